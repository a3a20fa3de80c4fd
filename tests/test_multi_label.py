"""Examples with several labels or none: training accepts losses and metrics that support them, and rejects others."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data import random_batch, random_table
from support.networks import largest_difference, linear_model, train_steps
from support.shared import adapted, sgd, topology_of

import jaxddp
from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import AugmentConfig, Config, DataConfig
from jaxddp.config.registry import METRICS
from jaxddp.core.errors import InputError
from jaxddp.data.order import EvalOrder, columns, stacked_columns
from jaxddp.data.source import LabelKind, labels_of
from jaxddp.engine.objective import Objective, example_loss
from jaxddp.engine.ways.way import Way
from jaxddp.losses import binary_cross_entropy, sigmoid_cross_entropy
from jaxddp.setup.user_objects import losses_of, metrics_of, objects_of_arguments

NAMES = tuple("abcde")
SEVERAL = LabelKind(5, "several labels")
METRIC_NAMES = ("map", "f1", "exact_match")


def table_of(size: int, seed: int = 0) -> jaxddp.ArrayTable:
    """Return images whose colour is the sum of the colours of their labels. Some images have no label."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((size, 5)) < 0.3).astype(np.uint8)
    colours = np.random.default_rng(99).integers(0, 60, (5, 3))
    images = 60 + (labels @ colours)[:, None, None, :] + rng.integers(-40, 40, (size, 6, 6, 3))
    return jaxddp.ArrayTable(np.clip(images, 0, 255).astype(np.uint8), labels, NAMES)


TABLE, VAL = table_of(50), table_of(23, seed=1)


def test_a_table_of_arrays_keeps_label_rows():
    assert TABLE.labels.dtype == np.uint8 and TABLE.labels.shape == (50, 5) and not TABLE.labels.any(1).all()
    labels = labels_of(TABLE)
    assert labels.kind == SEVERAL
    assert labels.counts.tolist() == TABLE.labels.sum(0).tolist()
    assert labels.of(3).tolist() == np.flatnonzero(TABLE.labels[3]).tolist()
    with_one_label = np.flatnonzero(TABLE.labels.sum(1) == 1)
    assert np.flatnonzero(labels.single >= 0).tolist() == with_one_label.tolist()
    assert TABLE.labels[with_one_label, labels.single[with_one_label]].all()
    selected, selected_labels = TABLE.select("b,e"), TABLE.labels[:, [1, 4]]
    assert selected.class_names == ("b", "e")
    assert selected.labels.tolist() == selected_labels[selected_labels.any(1)].tolist()
    message = "classes 'b': no example has one of the 1 selected classes .1 example, the first is row 0"
    with pytest.raises(InputError, match=message):
        TABLE.rows(np.flatnonzero(TABLE.labels[:, 1] == 0)[:1]).select("b")
    subset = TABLE.take(20)
    assert len(subset) == 20 and subset.fingerprint != TABLE.fingerprint
    assert jaxddp.ArrayTable(TABLE.images, 1 - TABLE.labels, NAMES).fingerprint != TABLE.fingerprint
    assert jaxddp.ArrayTable(TABLE.images, TABLE.labels.astype(bool), NAMES).fingerprint == TABLE.fingerprint


def test_invalid_label_rows_raise_a_one_line_error():
    with pytest.raises(InputError, match=r"labels of shape \(50, 4\) for 50 images: give one label per image, or.* 5"):
        jaxddp.ArrayTable(TABLE.images, np.zeros((50, 4), int), NAMES)
    with pytest.raises(InputError, match="label 2 of row 0: give 1 if the image is of class 0, else 0"):
        jaxddp.ArrayTable(TABLE.images, np.full((50, 5), 2), NAMES)


def test_batches_have_label_rows_and_padding_has_no_label():
    order = EvalOrder(23, 8)
    batch = columns(VAL, order, 2)
    assert batch.label.dtype == np.uint8 and batch.label.shape == (8, 5)
    np.testing.assert_array_equal(batch.label[:7], VAL.labels[16:])
    assert not batch.label[7].any() and batch.mask.tolist() == [1] * 7 + [0]
    assert stacked_columns(VAL, order, range(3)).label.shape == (8, 3, 5)


def step_in_float64(devices: int):
    batch = random_batch(24, masked=5)._replace(label=table_of(24).labels)
    preprocess = Preprocess(augment=AugmentConfig(flip=True, cutmix=1.0), dtype=jnp.float64)
    loss = example_loss(binary_cross_entropy(0.1, (1.0, 4.0, 0.5, 2.0, 3.0)), SEVERAL)
    objective = Objective(adapted(linear_model()), loss, preprocess, {"exact_match": METRICS.get("exact_match")})
    _, (sums,), state = train_steps(objective, Way(topology_of(devices)), [batch])
    return state.params, sums.means()


@pytest.mark.slow
def test_a_step_of_mixed_images_is_the_same_on_any_number_of_devices():
    with jax.enable_x64(True):
        params, means = step_in_float64(1)
        other_params, other_means = step_in_float64(4)
        assert largest_difference(other_params, params) < 1e-9 and other_means == pytest.approx(means, abs=1e-9)


@pytest.mark.slow
def test_a_multi_label_run_learns_and_its_metrics_equal_scikit_learns():
    from sklearn.metrics import average_precision_score, f1_score  # Its import takes more than a second.

    results = {}
    for devices, cache in [(1, "none"), (4, "device")]:
        data = DataConfig(image_size=6, crop="whole", cache=cache, augment=AugmentConfig(flip=False))
        more = {"data": data, "metrics": {name: METRICS.get(name) for name in METRIC_NAMES}}
        setup = jaxddp.prepare_training(linear_model(), TABLE, devices, sgd(0.3), 40 // devices, epochs=20, **more)
        more = {"val": VAL, "listeners": (), "eval_every": "10 epochs", "self_test": "always"}
        state, history = jaxddp.train(jaxddp.sigmoid_cross_entropy, setup, **more)
        results[devices] = np.asarray(state.params["weight"]), {name: history.val[name] for name in METRIC_NAMES}
    np.testing.assert_allclose(results[1][0], results[4][0], rtol=1e-4, atol=1e-6)
    pixels = (VAL.images / 255 - np.array(data.mean)) / np.array(data.std)
    logits = pixels.reshape(23, -1) @ results[4][0]
    assert results[4][1]["map"][-1] == pytest.approx(average_precision_score(VAL.labels, logits), abs=1e-6)
    assert results[4][1]["f1"][-1] == pytest.approx(f1_score(VAL.labels, logits > 0, average="macro"), abs=1e-12)
    assert results[4][1]["exact_match"][-1] == pytest.approx(((logits > 0) == VAL.labels).all(1).mean(), abs=1e-6)
    assert results[4][1]["map"][-1] > 0.5


def prepare(**options):
    return jaxddp.prepare_training(linear_model(), TABLE, 2, sgd(0.1), 4, **options)


def test_python_objects_for_one_label_raise_a_one_line_error():
    setup = prepare()
    assert list(setup.metrics) == ["map"] and setup.loss.function is sigmoid_cross_entropy
    with pytest.raises(InputError, match="loss softmax_cross_entropy takes one label or .*, give labels.argmax"):
        jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=())
    with pytest.raises(InputError, match="metrics: mine takes one label or shares per image, but the data have sev"):
        prepare(metrics={"mine": METRICS.get("top1")})
    message = "validation data: one label per image, and several labels per image in the tr"
    with pytest.raises(InputError, match=message):
        jaxddp.train(jaxddp.sigmoid_cross_entropy, setup, val=random_table(9), listeners=())
    with pytest.raises(InputError, match="data.sampling=balanced takes one label per image"):
        prepare(data=DataConfig(sampling="balanced", image_size=6, crop="whole"))
    for function in (jaxddp.topk_accuracy, jaxddp.show_predictions):
        with pytest.raises(InputError, match="table: its images have several labels, and this function takes one"):
            function(setup.state, setup, VAL)
    assert "map" in jaxddp.evaluate(setup.state, setup, VAL)


def test_config_names_for_one_label_raise_a_one_line_error():
    config = Config().replace(loss={"name": "cross_entropy"})
    data: Any = SimpleNamespace(labels=SEVERAL, class_counts=np.ones(5), num_examples=5)
    with pytest.raises(InputError, match="loss.name=cross_entropy takes one label or shares per image, but .* to bce"):
        losses_of(config, data, objects_of_arguments())
    assert losses_of(config.replace(loss={"name": "bce"}), data, objects_of_arguments())[0].labels == SEVERAL
    with pytest.raises(InputError, match="eval.metrics: top1 takes one label or shares per image, but .* f1 or map"):
        metrics_of(config, SEVERAL, objects_of_arguments())
    multi_label_config = config.replace(eval={"metrics": METRIC_NAMES})
    assert tuple(metrics_of(multi_label_config, SEVERAL, objects_of_arguments())) == METRIC_NAMES
    with pytest.raises(InputError, match="eval.metrics: exact_match takes several labels per image, but the data have"):
        metrics_of(multi_label_config, LabelKind(5), objects_of_arguments())


def test_the_titles_of_shown_inputs_list_all_their_labels():
    from jaxddp.api import show_inputs

    titles = [axes.get_title().splitlines() for axes in show_inputs(prepare(), 8).axes if axes.get_title()]
    for label, row in titles:
        label_row = TABLE.labels[int(row.removeprefix("row "))]
        assert label == (", ".join(np.array(NAMES)[label_row > 0]) or "no label")
