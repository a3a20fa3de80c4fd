"""Accepted losses are converted to losses of single examples, and all other losses raise an error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import costly, essential_and_rare
from support.data import CLASSES, NO_AUGMENTATION, random_batch, random_table
from support.networks import largest_difference, linear_model
from support.runs import setup_of, train
from support.shared import sgd

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import AugmentConfig
from jaxddp.core.errors import InputError
from jaxddp.data.labels import LabelKind
from jaxddp.engine.example_loss import example_loss
from jaxddp.engine.objective import Objective
from jaxddp.engine.programs import make_eval_step
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Way
from jaxddp.losses import cross_entropy
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt

TABLE, VAL = random_table(50), random_table(23, seed=1)
WEIGHTS = np.array([1.0, 4.0, 0.5, 2.0, 3.0])


def nll(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def weights_of(labels):
    return jnp.asarray(WEIGHTS, jnp.float32)[labels]


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
    if form == "weighted" and classes > len(WEIGHTS):
        pytest.skip("there are weights for five classes")
    per_example = example_loss(loss, LabelKind(classes))
    assert per_example.form == form
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=(12, classes)).astype(np.float32), rng.integers(0, classes, 12)
    values, weights = per_example(logits, labels)
    expected = np.asarray(nll(logits, labels))
    scale = WEIGHTS[labels] if form == "weighted" else np.ones(12)
    np.testing.assert_allclose(values, scale * expected, rtol=1e-5)
    np.testing.assert_allclose(weights, scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            normalized,
            r"loss normalized: the loss of a batch is .*, and the mean of its examples' losses is .*; return one",
        ),
        (lambda logits, labels: nll(logits, labels).sum(), "the loss of a batch is"),
        (
            lambda logits, labels: nll(logits - logits.mean(0), labels),
            "an example's loss is .* in a batch and .* alone",
        ),
        (lambda logits, labels: logits, r"returned float32\[9, 5\] for logits float32\[9, 5\]"),
        (lambda logits, labels: (nll(logits, labels), 1), r"returned float32\[9\], int32\[\] for"),
        (lambda logits, labels: None, "returned None for"),
        (lambda logits: logits, "fails for logits .*: TypeError"),
        (lambda logits, labels: (nll(logits, labels).sum(), jnp.abs(logits).sum()), "its weight depends on the logits"),
        (
            lambda logits, labels: (nll(logits, labels).mean(), jnp.ones(())),
            r"\(sum, weight\) of a batch is .*, and the sum over its examples is",
        ),
        (
            lambda logits, labels: (nll(logits, labels).sum(), jnp.zeros(())),
            "its weight over a batch of all classes is 0; give positive weights",
        ),
        (3, "loss: an object of type int was given; give a function"),
    ],
)
def test_an_invalid_loss_raises_a_one_line_error(loss, message):
    with pytest.raises(InputError, match=message) as raised:
        example_loss(loss, LabelKind(CLASSES))
    assert "\n" not in str(raised.value)


@pytest.mark.slow
@given(st.lists(st.floats(0.25, 4), min_size=CLASSES, max_size=CLASSES))
@costly
def test_class_weights_that_are_normalized_within_the_batch_are_never_taken_for_a_mean(weights):
    table = jnp.asarray(weights, jnp.float32)

    def loss(logits, labels):
        example_weights = table[labels]
        return (example_weights * nll(logits, labels)).sum() / example_weights.sum()

    equal = max(weights) / min(weights) < 1 + 1e-6
    if equal:
        assert example_loss(loss, LabelKind(CLASSES)).form == "mean"
    elif max(weights) / min(weights) > 1.001:
        with pytest.raises(InputError, match="the loss of a batch is"):
            example_loss(loss, LabelKind(CLASSES))


def float64_objects(loss, devices: int):
    topology, optimizer = Topology.create(devices), sgd(0.1)
    preprocess = Preprocess(augment=AugmentConfig(flip=False), dtype=jnp.float64)
    objective = Objective(adapt(linear_model()), example_loss(loss, LabelKind(CLASSES)), preprocess)
    params, model_state = objective.model.init(jax.random.key(0), jnp.zeros((1, 6, 6, 3), jnp.float64))
    state = TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params))
    return objective, topology, optimizer, topology.replicate(jax.device_get(state))


@pytest.mark.slow
def test_a_weighted_loss_on_any_number_of_devices_is_that_of_the_whole_batch():
    """Compare with the normalized loss of the whole global batch, with padding on the last devices."""
    batch = random_batch(24, masked=5)
    with jax.enable_x64(True):
        objective, topology, _, state = float64_objects(weighted, 1)
        real = batch.mask > 0

        def whole(params):
            images = objective.preprocess(batch, train=True).images
            logits = objective.model.apply(params, {}, images, train=True, key=None)[0]
            return normalized(logits[real], batch.label[real])

        loss, gradient = jax.jit(jax.value_and_grad(whole))(jax.device_get(state.params))
        expected = jax.tree.map(lambda p, g: np.asarray(p - 0.1 * g), state.params, gradient)
        for devices in (1, 8):
            objective, topology, optimizer, state = float64_objects(weighted, devices)
            after, sums = Way(topology).step(Phases(objective, optimizer))(state, topology.place(batch))
            assert sums.means()["loss"] == pytest.approx(float(loss), abs=1e-9)
            assert sums.count() == 19
            assert largest_difference(jax.device_get(after.params), expected) < 1e-9


@pytest.mark.slow
def test_evaluation_divides_by_the_weights_and_counts_the_examples():
    batch = random_batch(24, masked=5)
    with jax.enable_x64(True):
        objective, topology, _, state = float64_objects(weighted, 4)
        sums = make_eval_step(objective, topology)(state, topology.place(batch))
        images = objective.preprocess(batch, train=False).images
        logits = objective.model.apply(state.params, {}, images, train=False, key=None)[0]
        real = batch.mask > 0
        assert sums.means()["loss"] == pytest.approx(float(normalized(logits[real], batch.label[real])), abs=1e-9)
        assert sums.count() == 19


@pytest.mark.slow
def test_a_weighted_run_is_the_same_on_one_device_and_on_four():
    losses = []
    for devices in (1, 4):
        setup = setup_of(linear_model(), sgd(0.05), TABLE, devices=devices, data=NO_AUGMENTATION, loss=weighted)
        recorded: list[float] = []
        listener = type(
            "Losses", (), {"step": lambda self, record, recorded=recorded: recorded.append(record.metrics["loss"])}
        )()
        changes = {"train": {"duration": "8 steps"}, "log": {"every": "1 step"}}
        train(setup, changes, val=VAL, listeners=[listener])
        losses.append(recorded)
    assert len(losses[0]) == 8
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_a_loss_of_probabilities_is_probed_with_probabilities():
    def of_probabilities(probabilities, labels):
        return -jnp.log(jnp.take_along_axis(probabilities, labels[:, None], axis=1)).mean()

    assert example_loss(of_probabilities, LabelKind(CLASSES)).form == "mean"
    with pytest.raises(InputError, match="the loss of a batch is nan"):
        example_loss(lambda logits, labels: jnp.log(-jnp.abs(logits)).mean(), LabelKind(CLASSES))


def test_the_built_in_loss_has_the_form_of_examples():
    for smoothing in (0.0, 0.1):
        assert example_loss(cross_entropy(smoothing), LabelKind(CLASSES)).form == "examples"
