"""The built-in losses equal PyTorch's; losses of users are those of single examples, and all others raise an error."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import essential_and_rare
from support.data import CLASSES, random_batch, random_table
from support.networks import fresh_state, largest_difference, linear_model, objective_of, train_steps
from support.shared import sgd, topology_of

from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.data.source import LabelKind
from jaxddp.engine.objective import example_loss
from jaxddp.engine.programs import make_eval_step
from jaxddp.engine.ways.way import Way
from jaxddp.losses import binary_cross_entropy, cross_entropy, negative_log_likelihood
from jaxddp.mesh import Topology
from jaxddp.recipe.file import read_recipe
from jaxddp.setup.recipe import make_objects
from jaxddp.setup.resources import Layout, TrainingData
from jaxddp.setup.user_objects import class_weights, losses_of, objects_of_arguments

LOGITS = np.array([[1.0, -0.5, 2.0], [0.25, 0.0, -1.5], [3.0, 1.0, -2.0], [-1.0, 0.5, 0.75]])
LABELS, WEIGHTS = np.array([2, 0, 1, 1]), (1.0, 4.0, 0.5)
LABEL_SETS = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0], [0, 1, 1]])
COUNTS = np.array([10, 2, 4])


def batch_loss(loss, logits, labels):
    """Return the weighted mean of a loss over a batch. The loss may have any supported signature."""
    values, weights = example_loss(loss, LabelKind(logits.shape[1]))(jnp.asarray(logits), jnp.asarray(labels))
    return float(values.sum() / weights.sum())


@pytest.mark.parametrize(
    ("smoothing", "weights", "expected"),
    [(0.0, None, 1.0231705035078849), (0.1, None, 1.0877538368412183), (0.1, WEIGHTS, 1.3647646009481558)],
)
def test_cross_entropy_and_nll_equal_pytorchs(smoothing, weights, expected):
    """The expected values are results of torch 2.13, `F.cross_entropy(*map(torch.tensor, (LOGITS, LABELS, WEIGHTS)),
    label_smoothing=0.1)`. Without smoothing, `F.nll_loss` of `log_softmax` returns the same values."""
    with jax.enable_x64(True):
        assert batch_loss(cross_entropy(smoothing, weights), LOGITS, LABELS) == pytest.approx(expected, abs=1e-12)
        log_probabilities = np.asarray(jax.nn.log_softmax(LOGITS))
        nll = negative_log_likelihood(smoothing, weights)
        assert batch_loss(nll, log_probabilities, LABELS) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "smoothing", "weights", "expected"),
    [
        (LABELS, 0.0, None, 0.7331461074259176),
        (LABELS, 0.1, WEIGHTS, 1.1967670815556406),
        (LABEL_SETS, 0.0, None, 0.35814610742591757),
        (LABEL_SETS, 0.0, WEIGHTS, 0.8116976371111964),
    ],
)
def test_binary_cross_entropy_equals_pytorchs(labels, smoothing, weights, expected):
    """The expected values are results of torch 2.13: `F.binary_cross_entropy_with_logits(torch.tensor(LOGITS), targets,
    weight=torch.tensor(WEIGHTS))`. The targets are one-hot and smoothed as `one_hot * 0.9 + 0.1 / 3`, or are the rows
    of LABEL_SETS."""
    with jax.enable_x64(True):
        value = binary_cross_entropy(smoothing, weights)(jnp.asarray(LOGITS), jnp.asarray(labels)).mean()
    assert float(value) == pytest.approx(expected, abs=1e-12)


def test_the_mild_recipes_loss_is_summed_over_the_classes():
    """The expected value is that of torch 2.14, `F.binary_cross_entropy_with_logits(…, reduction="sum") / 4`, for
    targets that are smoothed by 0.08. Mosaic's Composer divides the same sum by the batch size."""
    recipe = read_recipe("imagenet_resnet50_mild")
    with jax.enable_x64(True):
        loss = recipe.hooks["get_loss"](recipe.config)
        assert batch_loss(loss, LOGITS, LABELS) == pytest.approx(2.2511049889444195, abs=1e-12)


def test_smoothing_moves_multi_hot_targets_towards_one_half():
    losses = binary_cross_entropy(0.2)(jnp.asarray(LOGITS), jnp.asarray(LABEL_SETS))
    targets = jnp.asarray(np.where(LABEL_SETS, 0.9, 0.1))
    expected = optax.sigmoid_binary_cross_entropy(jnp.asarray(LOGITS), targets).mean(-1)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def config_of(**loss) -> Config:
    return Config().replace(loss=loss, train={"label_smoothing": 0.1})


def losses_with(config, counts=COUNTS, num_examples=16):
    data: Any = SimpleNamespace(labels=LabelKind(len(counts)), class_counts=counts, num_examples=num_examples)
    return losses_of(config, data, objects_of_arguments())


def test_balanced_weights_equal_scikit_learns():
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.repeat(np.arange(3), COUNTS)
    weights = class_weights(config_of(class_weights="balanced"), COUNTS, COUNTS.sum())
    np.testing.assert_allclose(weights, compute_class_weight("balanced", classes=np.arange(3), y=labels), rtol=1e-15)
    assert class_weights(config_of(class_weights="1,4,0.5"), COUNTS, COUNTS.sum()).tolist() == [1, 4, 0.5]
    assert class_weights(config_of(), COUNTS, COUNTS.sum()) is None
    # With several labels for each of 8 examples
    np.testing.assert_allclose(class_weights(config_of(class_weights="balanced"), COUNTS, 8), 8 / (3 * COUNTS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ("cross_entropy", "nll", "bce"))
def test_evaluation_is_weighted_and_not_smoothed(name):
    train_loss, eval_loss = losses_with(config_of(name=name, class_weights="balanced"))
    weights = tuple(16 / (3 * COUNTS))
    function = {"cross_entropy": cross_entropy, "nll": negative_log_likelihood, "bce": binary_cross_entropy}[name]
    logits = np.asarray(jax.nn.log_softmax(LOGITS.astype(np.float32)))
    for loss, smoothing in ((train_loss, 0.1), (eval_loss, 0.0)):
        assert loss.form == ("examples" if name == "bce" else "weighted")
        expected = batch_loss(function(smoothing, weights), logits, LABELS)
        assert batch_loss(loss.function, logits, LABELS) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"class_weights": "1,2"}, "loss.class_weights: 2 weights for 3 classes; give one for each, in order"),
        ({"class_weights": "1,x,2"}, "loss.class_weights='x': expected a number, above 0"),
        ({"class_weights": "1,0,2"}, "loss.class_weights=0.0: expected above 0, at most 1,000,000"),
        ({"name": "bare", "class_weights": "1,2,3"}, "loss.class_weights: loss.name=bare takes no weights"),
    ],
)
def test_invalid_class_weights_raise_a_one_line_error(loss, message, monkeypatch):
    from jaxddp.config.registry import LOSSES

    LOSSES.names()
    monkeypatch.setitem(LOSSES._added, "bare", lambda config: cross_entropy())
    with pytest.raises(InputError, match=message):
        losses_with(config_of(**loss))
    # A class without images cannot be balanced.
    with pytest.raises(InputError, match="loss.class_weights=balanced: class 1 of 3 has no training images; give the"):
        losses_with(config_of(class_weights="balanced"), np.array([3, 0, 1]), 4)
    for make in (cross_entropy, binary_cross_entropy):
        for settings, line in (((2,), "label_smoothing=2.0: expected at"), ((0, {0: 1}), "class_weights={0: 1}: exp"),
                               ((0, np.ones(1)), "class_weights: 1 weight for 3 classes; give one for")):  # fmt: skip
            with pytest.raises(InputError, match=f"^{line}"):
                make(*settings)(LOGITS.astype(np.float32), LABELS)


def step_in_float64(loss, devices: int, batch):
    """Return the parameters after a step of plain SGD, the metrics of the step, and the metrics of evaluation."""
    objective, topology = objective_of(linear_model(), loss), topology_of(devices)
    initial = fresh_state(objective, sgd(0.1), topology)
    evaluated = make_eval_step(objective, topology)(initial, topology.place(batch))
    _, (sums,), state = train_steps(objective, Way(topology), [batch])
    assert sums.count() == evaluated.count() == 19
    return state.params, sums.means(), evaluated.means()


OF_FIVE = np.array([1.0, 4.0, 0.5, 2.0, 3.0])


def nll(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def weights_of(labels):
    return jnp.asarray(OF_FIVE, jnp.float32)[labels]


def mean(logits, labels):
    return nll(logits, labels).mean()


def weighted(logits, labels):
    weights = weights_of(labels).astype(logits.dtype)
    return (weights * nll(logits, labels)).sum(), weights.sum()


def normalized(logits, labels):
    """Return a loss like PyTorch's weighted loss, which is not the mean of the losses of its examples."""
    total, weight = weighted(logits, labels)
    return total / weight


@pytest.mark.parametrize(("loss", "form"), [(nll, "examples"), (mean, "mean"), (weighted, "weighted")])
@pytest.mark.parametrize("classes", essential_and_rare((2, 300), 5, 9))
def test_the_form_of_a_loss_is_detected_and_examples_get_their_losses_and_weights(loss, form, classes):
    if form == "weighted" and classes > len(OF_FIVE):
        pytest.skip("there are weights for five classes")
    per_example = example_loss(loss, LabelKind(classes))
    assert per_example.form == form
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=(12, classes)).astype(np.float32), rng.integers(0, classes, 12)
    values, weights = per_example(logits, labels)
    expected = np.asarray(nll(logits, labels))
    scale = OF_FIVE[labels] if form == "weighted" else np.ones(12)
    np.testing.assert_allclose(values, scale * expected, rtol=1e-5)
    np.testing.assert_allclose(weights, scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (normalized, "loss normalized: the mean loss is .* for a batch and .* if its parts are computed alone; return"),
        (lambda logits, labels: nll(logits - logits.mean(0), labels), "an example's loss is .* for a batch and .* if"),
        (lambda logits, labels: logits, r"returned float32\[9, 5\] for logits float32\[9, 5\]"),
        (lambda logits: logits, "fails for logits .*: TypeError"),
        (lambda logits, labels: (nll(logits, labels).sum(), jnp.abs(logits).sum()), "its weight depends on the logits"),
        (lambda logits, labels: (mean(logits, labels), jnp.ones(())), "the sum or the weight is .* for a batch and"),
        (lambda logits, labels: (nll(logits, labels).sum(), jnp.zeros(())), "its weight over .* is 0; give positive"),
        (3, "loss: an object of type int was given; give a function"),
    ],
)
def test_an_invalid_loss_raises_a_one_line_error(loss, message):
    with pytest.raises(InputError, match=message) as raised:
        example_loss(loss, LabelKind(CLASSES))
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_weighted_loss_on_any_number_of_devices_is_that_of_the_whole_batch():
    """Compare with the normalized loss of the whole global batch, with padding on the last devices."""
    batch = random_batch(24, masked=5)
    with jax.enable_x64(True):
        objective = objective_of(linear_model(), weighted)
        params = jax.device_get(fresh_state(objective, sgd(0.1), topology_of(1)).params)
        real = batch.mask > 0

        def whole(params):
            images = objective.preprocess(batch, train=True).images
            logits = objective.model.apply(params, {}, images, train=True, key=None)[0]
            return normalized(logits[real], batch.label[real])

        loss, gradient = jax.jit(jax.value_and_grad(whole))(params)
        expected = jax.tree.map(lambda p, g: np.asarray(p - 0.1 * g), params, gradient)
        for devices in (1, 8):
            params, *metrics = step_in_float64(weighted, devices, batch)
            for measured in metrics:
                assert measured["loss"] == pytest.approx(float(loss), abs=1e-9)
            assert largest_difference(params, expected) < 1e-9


def test_a_loss_of_probabilities_is_probed_with_probabilities():
    def of_probabilities(probabilities, labels):
        return -jnp.log(jnp.take_along_axis(probabilities, labels[:, None], axis=1)).mean()

    assert example_loss(of_probabilities, LabelKind(CLASSES)).form == "mean"
    with pytest.raises(InputError, match="the mean loss is nan for a batch"):
        example_loss(lambda logits, labels: jnp.log(-jnp.abs(logits)).mean(), LabelKind(CLASSES))


@pytest.mark.slow
def test_balanced_weights_of_a_recipe_come_from_its_training_data():
    config = config_of(class_weights="balanced").replace(
        model={"name": "resnet10", "width": 2}, data={"image_size": 16, "crop": "whole"}, train={"batch_size": 8}
    )
    table = dataclasses.replace(random_table(50), labels=np.repeat(np.arange(CLASSES), [3, 7, 10, 10, 20]))
    layout = Layout.of(config, Topology.create(1), TrainingData.of(table, config.data))
    objects = make_objects(config, layout, objects_of_arguments())
    values, weights = objects["loss"](jnp.zeros((5, CLASSES)), jnp.arange(5))
    np.testing.assert_allclose(weights, 50 / (5 * np.array([3, 7, 10, 10, 20])), rtol=1e-6)
    np.testing.assert_allclose(values, 0.9 * weights * np.log(5) + 0.1 * np.mean(weights) * np.log(5), rtol=1e-6)
