"""Metrics over a whole set: exact with padding, in any batches, on any devices, and equal to scikit-learn's."""

import csv
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.cases import essential_and_rare
from support.data import CLASSES, NO_AUGMENTATION, random_table
from support.networks import linear_model
from support.runs import copy_setup, setup_of, train
from support.shared import sgd

import jaxddp
from jaxddp.config import Config
from jaxddp.config.registry import LOGGERS, METRICS
from jaxddp.core.errors import InputError
from jaxddp.data.source import LabelKind
from jaxddp.engine.objective import SetSums, compute_contributions, finish_metrics
from jaxddp.metrics import average_precision
from jaxddp.setup.user_objects import metrics_of as make_metrics
from jaxddp.setup.user_objects import objects_of_arguments

NAMES = ("mean_class_accuracy", "confusion", "ece", "map", "f1")
VAL = random_table(29, seed=1)
FEW_LEVELS = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 3.0])
"""Scores, many of which are equal."""


def metrics_of(logits, labels, mask=None, names=NAMES):
    """Return the numbers that the metrics compute from one batch, without devices."""
    mask = np.ones(len(logits), np.float32) if mask is None else mask
    metrics, sums = {name: METRICS.get(name) for name in names}, SetSums()
    contributions = compute_contributions(metrics, jnp.asarray(logits), jnp.asarray(labels), jnp.asarray(mask))
    sums.add(jax.tree.map(lambda each: each[None], contributions))
    results = sums.results()
    return finish_metrics(metrics, results) | {"confusion": results.get("confusion")}


@st.composite
def draw_set(draw, several=False):
    """Draw (logits float32[N, 4], labels, mask) with ties among the logits; labels int32[N] or multi-hot [N, 4]."""
    size, classes = 24, 4
    logits = draw(arrays.arrays(np.float32, (size, classes), elements=FEW_LEVELS))
    mask = draw(arrays.arrays(np.float32, size, elements=st.sampled_from([0.0, 1.0])))
    mask[draw(st.integers(0, size - 1))] = 1
    shape, most = ((size, classes), 1) if several else (size, classes - 1)
    return logits, draw(arrays.arrays(np.int32, shape, elements=st.integers(0, most))), mask


@pytest.mark.slow
@given(draw_set())
def test_metrics_of_one_label_equal_scikit_learns(example_set):
    from sklearn.metrics import average_precision_score, balanced_accuracy_score, confusion_matrix, f1_score

    actual, (logits, labels, mask) = metrics_of(*example_set), example_set
    logits, labels, classes = logits[mask > 0], labels[mask > 0], np.arange(4)
    predictions, expected = logits.argmax(1), confusion_matrix(labels, logits.argmax(1), labels=classes)
    is_present = expected.sum(1) > 0
    accuracies = expected.diagonal()[is_present] / expected.sum(1)[is_present]
    assert actual["mean_class_accuracy"] == pytest.approx(accuracies.mean(), abs=1e-12)
    if set(predictions) <= set(labels):
        assert actual["mean_class_accuracy"] == pytest.approx(balanced_accuracy_score(labels, predictions), abs=1e-12)
    assert actual["f1"] == pytest.approx(f1_score(labels, predictions, average="macro", zero_division=0), abs=1e-12)
    assert actual["f1_micro"] == pytest.approx((labels == predictions).mean(), abs=1e-12)
    assert actual["confusion"].tolist() == expected.tolist()
    scores = np.asarray(jax.nn.log_softmax(example_set[0]))[mask > 0]
    of_classes = [average_precision_score(labels == k, scores[:, k]) for k in classes[is_present]]
    assert actual["map"] == pytest.approx(np.mean(of_classes), abs=1e-12)


@given(draw_set(several=True))
def test_metrics_of_several_labels_equal_scikit_learns(example_set):
    from sklearn.metrics import average_precision_score, f1_score

    logits, labels, mask = example_set
    actual = metrics_of(logits, labels.astype(np.float32), mask, ("map", "f1"))
    exact = np.asarray(METRICS.get("exact_match")(jnp.asarray(logits), jnp.asarray(labels)))[mask > 0]
    logits, labels = logits[mask > 0], labels[mask > 0]
    is_present, predictions = labels.any(0), logits > 0
    of_classes = [average_precision_score(labels[:, k], logits[:, k]) for k in np.flatnonzero(is_present)]
    assert actual["map"] == pytest.approx(np.mean(of_classes) if of_classes else np.nan, abs=1e-12, nan_ok=True)
    for name, average in {"f1": "macro", "f1_micro": "micro"}.items():
        # By default, scikit-learn warns and counts 0 for a class without labels and predictions; we leave it out.
        expected = f1_score(labels, predictions, average=average, zero_division=np.nan)
        assert actual[name] == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert exact.tolist() == (predictions == labels).all(1).tolist()


@pytest.mark.parametrize("several", [False, True])
def test_averages_over_classes_leave_out_classes_that_do_not_occur(several):
    labels = np.arange(24) % 8
    logits = np.eye(10, dtype=np.float32)[labels] - 0.5
    given_labels = np.eye(10, dtype=np.float32)[labels] if several else labels.astype(np.int32)
    names = ("f1", "map") if several else ("f1", "map", "mean_class_accuracy")
    actual = metrics_of(logits, given_labels, names=names)
    assert {name: actual[name] for name in names} == dict.fromkeys(names, 1)
    # Class 8 has no labels. With a prediction, its F1 score is 0, as in scikit-learn.
    logits[0, 8] = 2
    of_class_0 = 1 if several else 4 / 5
    assert metrics_of(logits, given_labels, names=names)["f1"] == pytest.approx((of_class_0 + 7) / 9)


def test_logits_that_are_not_finite_and_missing_classes_give_no_number():
    logits, labels = np.zeros((24, 4), np.float32), np.zeros(24, np.int32)
    logits[1, 0] = np.nan
    actual = metrics_of(logits, labels)
    assert np.isnan([actual["ece"], actual["map"]]).all()
    # A NaN is never a correct prediction, and is not counted as a prediction.
    assert actual["mean_class_accuracy"] == pytest.approx(23 / 24) and actual["confusion"].sum() == 23
    assert np.isnan(metrics_of(np.zeros((24, 4), np.float32), np.zeros((24, 4), np.float32), names=("map",))["map"])
    assert np.isnan(average_precision(np.array([np.nan, 1]), np.array([True, False])))


@pytest.fixture(scope="module")
def setups():
    """Return setups of one network with all metrics, by the number of devices: 1 and 4."""
    metrics = {name: METRICS.get(name) for name in NAMES}
    config = jaxddp.Config().replace(parallel={"self_test": "never"}, eval={"metrics": ("top1",)})
    plain = {n: setup_of(linear_model(), sgd(0.1), devices=n, config=config, data=NO_AUGMENTATION) for n in (1, 4)}
    return {n: setup.changed(metrics={**setup.metrics, **metrics}) for n, setup in plain.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    essential_and_rare((((4, 8, False), (4, 64, True)),), ((1, 8, False), (4, 12, True), (4, 64, False))),
    ids=str,
)
def test_metrics_are_equal_for_any_batch_size_and_number_of_devices(setups, settings):
    def measure(devices, size, resident):
        setup = setups[devices]
        return setup.evaluator(VAL, size, resident=resident).measure(setup.state)

    first, *others = (measure(*setting) for setting in [(1, 29, False), *settings])
    assert list(first[0]) == ["loss", "top1", "mean_class_accuracy", "ece", "map", "f1", "f1_micro", "count"]
    state, setup = setups[1].state, setups[1]
    images = (VAL.images / 255 - np.array(setup.config.data.mean)) / np.array(setup.config.data.std)
    logits = images.reshape(len(VAL), -1) @ np.asarray(state.params["weight"], np.float64)
    by_hand = metrics_of(logits.astype(np.float32), VAL.labels)
    for metrics, sets in (first, *others):
        for name in ("mean_class_accuracy", "map", "f1", "f1_micro", "top1"):
            assert metrics[name] == first[0][name], name
        assert metrics["ece"] == pytest.approx(first[0]["ece"], abs=1e-6)
        np.testing.assert_array_equal(sets["confusion"], first[1]["confusion"])
        assert sets["map"]["scores"].shape == (29, CLASSES)
        np.testing.assert_allclose(sets["map"]["scores"], first[1]["map"]["scores"], atol=1e-5)
        assert metrics["count"] == 29
    for name in ("mean_class_accuracy", "ece", "map", "f1"):
        assert first[0][name] == pytest.approx(by_hand[name], abs=1e-5)
    np.testing.assert_array_equal(first[1]["confusion"], by_hand["confusion"])


def test_training_steps_do_not_compute_metrics_over_a_set(setups):
    names = []

    class MetricNames:
        def step(self, record):
            names.append(set(record.metrics))

    changes = {"train": {"duration": "2 steps"}, "log": {"every": "1 step"}, "eval": {"every": "0 steps"}}
    train(copy_setup(setups[1]), changes, listeners=[MetricNames()])
    assert names == [{"loss", "top1"}] * 2


@pytest.mark.slow
def test_the_table_of_confusions_names_the_classes(tmp_path):
    setup = jaxddp.prepare_training(linear_model(), random_table(50), 2, sgd(0.1), 4, epochs=1)
    words = {"val": VAL, "listeners": (), "workdir": tmp_path, "log_to": "confusion", "self_test": "never"}
    _, history = jaxddp.train(jaxddp.softmax_cross_entropy, setup, **words)
    header, *rows = csv.reader((tmp_path / "confusion.csv").open())
    assert header == ["step 7", "accuracy", "images", *"abcde"]
    counts = np.array([row[3:] for row in rows], int)
    assert [row[0] for row in rows] == list("abcde")
    assert counts.sum(1).tolist() == [int(row[2]) for row in rows] == np.bincount(VAL.labels).tolist()
    assert [float(row[1]) for row in rows] == (counts.diagonal() / counts.sum(1)).tolist()
    assert counts.trace() / 29 == pytest.approx(history.val["top1"][-1], abs=1e-6)
    assert "confusion" not in history.val


def test_the_table_has_no_accuracy_of_a_class_without_images_and_escapes_formulas_on_request(tmp_path):
    listener = LOGGERS.get("confusion")(Config().replace(log={"guard_formulas": True}), tmp_path)
    listener.start(SimpleNamespace(class_names=("=1, 1", "b-c")))
    sets = {"confusion": np.array([[2, 1], [0, 0]])}
    listener.evaluation(SimpleNamespace(final=True, split="val", sets=sets, step=3))
    text = 'step 3,accuracy,images,"\'=1, 1",b-c\n"\'=1, 1",0.6666666666666666,3,2,1\nb-c,,0,0,0\n'
    assert (tmp_path / "confusion.csv").read_text() == text


class Mean:
    """A metric over a set: the mean of the largest logits, from sums."""

    def sums(self, logits, labels, mask):
        return {"total": (logits.max(-1) * mask).sum(), "examples": mask.sum()}

    def finish(self, sums):
        return {"largest": sums["total"] / sums["examples"]}


def fail(*arguments):
    raise ValueError("no such thing")


def test_padding_with_nan_outputs_is_not_counted():
    logits, mask = jnp.array([[1.0, 2.0], [jnp.nan, jnp.inf]]), jnp.array([1.0, 0.0])
    sums = compute_contributions({"mine": Mean()}, logits, jnp.zeros(2, jnp.int32), mask)
    assert finish_metrics({"mine": Mean()}, sums) == {"largest": 2}


@pytest.mark.slow
def test_a_custom_metric_is_added_or_replaces_the_metric_of_its_name():
    config = Config().replace(eval={"metrics": ("top1", "top5", "top10", "ece")})
    given = {"mine": Mean(), "top1": METRICS.get("top5")}
    metrics = make_metrics(config, LabelKind(10), objects_of_arguments(metrics=given))
    assert set(metrics) == {"ece", "mine", "top1", "top5"} and metrics["top1"] is given["top1"]
    twice = objects_of_arguments(metrics={"mine": Mean(), "other": Mean()})
    with pytest.raises(InputError, match=r"^metrics: mine and other both measure '\w+'; rename one of them$"):
        make_metrics(config, LabelKind(4), twice)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            {"sums": lambda logits, labels, mask: {"total": logits.max(-1).sum(), "examples": mask.sum()}},
            "metrics: mine: largest is .* for a batch and .* if its parts are computed alone; return sums",
        ),
        (
            {"finish": lambda sums: "none"},
            r"metrics: mine: fails for logits float32\[9, 4\] and labels int32\[9\]: AttributeError: 'str'",
        ),
        ({"sums": fail}, r"metrics: mine: fails for .*\.py:\d+: fail: ValueError: no such thing"),
        ({"finish": lambda sums: {"loss": 1.0}}, "metrics: mine: 'loss' cannot be the name of a metric; give another"),
        (
            {"examples": lambda logits, labels: logits},
            "metrics: mine: a metric over a set needs finish and either sums or examples; give one of the two",
        ),
    ],
)
def test_an_invalid_metric_over_a_set_raises_a_one_line_error(methods, message):
    metric = type("Metric", (Mean,), {name: staticmethod(method) for name, method in methods.items()})()
    with pytest.raises(InputError, match=message):
        make_metrics(Config(), LabelKind(4), objects_of_arguments(metrics={"mine": metric}))
