"""Shares of classes, numbers to predict and weights of images: the way from a table to predictions, and metrics."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.data import CLASSES, NO_AUGMENTATION, random_batch
from support.networks import largest_difference, linear_model, train_steps
from support.runs import LEAN, fails
from support.shared import adapted, topology_of

import jaxddp
from jaxddp.augment.preprocess import Preprocess
from jaxddp.cli import main
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.data.formats.array_files import check_grades
from jaxddp.data.opening import RunData, open_evaluated, open_full_splits, open_one_split
from jaxddp.data.order import EvalOrder, SampleOrder, columns
from jaxddp.data.source import LabelKind, labels_of
from jaxddp.engine.objective import Objective, example_loss
from jaxddp.engine.ways.way import Way
from jaxddp.inference.output_files import write_out_of_fold
from jaxddp.losses import cross_entropy, huber, negative_log_likelihood, softmax_cross_entropy, squared_error
from jaxddp.metrics import R2, QuadraticKappa

NAMES = ("grade", "age")
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (24, 6, 6, 3), np.uint8)
NUMBERS = np.stack([IMAGES[..., 0].mean((1, 2)) // 30, IMAGES[..., 1].mean((1, 2)) / 255], 1)
WEIGHTS = RNG.uniform(0.5, 2, 24).astype(np.float32)


def write_table(path: Path, header: str, rows: Any) -> None:
    with path.open("w") as file:
        csv.writer(file).writerows([header.split(","), *rows])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for row, image in enumerate(IMAGES):
        Image.fromarray(image).save(tmp_path / f"{row}.png")
    write_table(tmp_path / "t.csv", "path,grade,age,w", [(f"{r}.png", *NUMBERS[r], WEIGHTS[r]) for r in range(24)])
    return tmp_path


def opened(folder: Path, **keys: Any) -> Any:
    return open_full_splits(DataConfig(path=str(folder / "t.csv"), val_share=0.25, **keys))


def test_a_table_holds_numbers_or_shares_and_weights(folder):
    splits = opened(folder, targets="numbers", weight_column="w")
    words = f"split {folder / 't.csv'} --targets numbers --weight-column w --folds 2 --out {folder / 'f.csv'}"
    assert main(["data", *words.split()]) == 0
    keys: Any = {"targets": "numbers", "weight_column": "w", "split_column": "fold", "val_fold": "1"}
    for split in (*splits.values(), *open_full_splits(DataConfig(path=str(folder / "f.csv"), **keys)).values()):
        labels, rows = labels_of(split), [int(split.record(row).id[:-4]) for row in range(len(split))]
        assert labels.kind == LabelKind(2, "numbers") and labels.ids == NAMES and (labels.single == -1).all()
        np.testing.assert_array_equal(labels.values, NUMBERS[rows].astype(np.float32))
        np.testing.assert_array_equal(split.weights, WEIGHTS[rows])
    assert [len(splits["train"]), len(splits["val"])] == [18, 6]
    other = opened(folder, targets="numbers")
    assert other["train"].weights is None and other["train"].fingerprint != splits["train"].fingerprint
    assert opened(folder, targets="numbers", columns="label=age")["val"].reading.endswith("1 column of numbers (age)")
    shares = labels_of(opened(folder, targets="shares", columns=("label=grade", "label=age"))["val"])
    assert shares.form == "shares" and shares.values.sum(1) == pytest.approx(np.ones(6))
    assert shares.amounts == pytest.approx(shares.values.sum(0))
    batch = columns(splits["train"], SampleOrder(18, 6, 0), 0)
    np.testing.assert_array_equal(batch.weight, splits["train"].weights[batch.row])
    np.testing.assert_array_equal(batch.label, splits["train"].labels[batch.row])
    assert columns(splits["val"], EvalOrder(6, 4), 1).weight is None
    # Another table has the same columns of numbers, and needs none that only training reads.
    write_table(folder / "other.csv", "path,grade,age", [("0.png", 3, 0.5)])
    keys = {"path": str(folder / "other.csv"), "columns": ("label=grade", "label=age"), "targets": "numbers"}
    data = DataConfig(**keys, val_share=0.25, weight_column="w", group_column="patient")
    other = open_one_split([keys["path"]], replace(data, path="t.csv"))
    for table in (open_evaluated(data, None, RunData("f", True))[1], other):
        assert labels_of(table).form == "numbers" and table.labels.tolist() == [[3, 0.5]]


@pytest.mark.parametrize(
    ("header", "row", "keys", "message"),
    [
        ("path,a,b", "0.png,inf,x", {"targets": "numbers"}, "t.csv:2: 'inf', 'x': give finite numbers, like 0.5"),
        ("path,a,b", "0.png,0,0", {"targets": "shares"}, "t.csv:2: '0', '0': give finite numbers of 0 or more that"),
        ("path,label,w", "0.png,a,0", {"weight_column": "w"}, "t.csv:2: w is no weight above 0: '0'; write it like"),
        ("path,label,w", "0.png,a,1e39", {"weight_column": "w"}, "t.csv:2: w is no weight above 0: '1e39'; write it"),
        ("path,label,w", "0.png,a,1", {"weight_column": "v"}, "data.weight_column: .* has no column 'v'"),
        ("path,a,b", "0.png,1,2", {"targets": "numbers", "classes": "0:1"}, "classes '0:1': the labels are numbers"),
    ],
)
def test_a_wrong_number_share_or_weight_raises_a_one_line_error(folder, header, row, keys, message):
    write_table(folder / "t.csv", header, [row.split(","), ["1.png", "1", "1"][: 1 + header.count(",")]])
    with pytest.raises(InputError, match=message):
        opened(folder, **keys)


def test_arrays_hold_numbers_shares_and_weights():
    table = jaxddp.ArrayTable(IMAGES, NUMBERS, NAMES, label_form="numbers", weights=WEIGHTS)
    assert labels_of(table).kind == LabelKind(2, "numbers") and "of 2 numbers (grade, age)" in repr(table)
    part = table.rows(np.arange(5))
    np.testing.assert_array_equal(part.weights, WEIGHTS[:5])
    assert part.labels.dtype == np.float32 and table.take(7).label_form == "numbers"
    assert jaxddp.ArrayTable(IMAGES, NUMBERS[:, 1], ("age",), label_form="numbers").labels.shape == (24, 1)
    assert (jaxddp.ArrayTable(IMAGES, np.full((24, 2), 3), NAMES, label_form="shares").labels == 0.5).all()
    for more, message in (
        ({"labels": NUMBERS * np.nan}, r"labels \[nan, nan\] of row 0: give finite numbers"),
        ({"labels": NUMBERS - 1, "label_form": "shares"}, "of row .: give finite numbers of 0 or more that are not"),
        ({"labels": NUMBERS[:, :1]}, r"labels of shape \(24, 1\) for 24 images: give 2 numbers for each"),
        ({"weights": WEIGHTS - 1}, "weights: .*; give 24 finite numbers above 0"),
    ):
        arguments: Any = {"labels": NUMBERS, "label_form": "numbers"} | more
        with pytest.raises(InputError, match=message):
            jaxddp.ArrayTable(IMAGES, class_names=NAMES, **arguments)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=40))
def test_kappa_equals_scikit_learns(pairs):
    from sklearn.metrics import cohen_kappa_score  # Its import takes more than a second.

    actual, predicted = np.array(pairs).T
    logits = jnp.eye(5)[predicted]
    measured = QuadraticKappa().finish(QuadraticKappa().examples(logits, jnp.asarray(actual)))
    numbers = jnp.stack([predicted, actual], 1) + 0.4, jnp.stack([actual, predicted], 1)  # Kappa is symmetric.
    assert QuadraticKappa().finish(QuadraticKappa().examples(*numbers)) == pytest.approx(measured, nan_ok=True)
    if len({*actual} | {*predicted}) > 1:
        expected = cohen_kappa_score(actual, predicted, weights="quadratic", labels=range(5))
        assert measured["kappa"] == pytest.approx(expected, abs=1e-9)


def test_kappa_needs_numbered_classes_in_the_order_of_their_numbers():
    check_grades(labels_of(jaxddp.ArrayTable(IMAGES, np.arange(24) % 3, ("0", "2", "10"))))
    message = "^eval.metrics: kappa compares grades, and the classes are in the order 0, 10"
    with pytest.raises(InputError, match=message):
        check_grades(labels_of(jaxddp.ArrayTable(IMAGES, np.arange(24) % 3, ("0", "10.0", "2"))))


def test_r2_equals_scikit_learns_and_huber_its_definition():
    from sklearn.metrics import r2_score

    targets = RNG.normal(size=(30, 2)).astype(np.float32)
    predictions = targets + RNG.normal(size=(30, 2)).astype(np.float32)
    measured = R2().finish({"predictions": predictions, "targets": targets})
    assert measured["r2"] == pytest.approx(r2_score(targets.astype(float), predictions), abs=1e-9)
    assert np.isnan(R2().finish({"predictions": predictions, "targets": np.ones((30, 2))})["r2"])
    assert huber(jnp.zeros((1, 2)), jnp.array([[3.0, 0.5]])).tolist() == [(2.5 + 0.125) / 2]


@pytest.mark.parametrize("make", [cross_entropy, negative_log_likelihood])
@pytest.mark.parametrize("settings", [(0.0,), (0.1,), (0.1, (1.0, 2.0, 0.5))])
def test_losses_of_shares_equal_mixed_losses_of_labels(make, settings):
    logits, share = jnp.asarray(RNG.normal(size=(1, 3))), jnp.asarray(RNG.dirichlet(np.ones(3), 1))
    of_labels = np.array([make(*settings)(logits, jnp.full(1, label)) for label in range(3)])
    np.testing.assert_allclose(make(*settings)(logits, share), np.tensordot(share[0], of_labels, 1), rtol=1e-6)


@pytest.mark.parametrize(("form", "loss"), [("numbers", squared_error), ("shares", softmax_cross_entropy)])
def test_a_weighted_step_follows_the_weighted_mean_on_any_number_of_devices(form, loss):
    label, weight = RNG.dirichlet(np.ones(CLASSES), 24), RNG.uniform(0.5, 2, 24)
    batch = random_batch(24, masked=5)._replace(label=label, weight=weight)
    preprocess = Preprocess(augment=NO_AUGMENTATION.augment, dtype=jnp.float64)
    with jax.enable_x64(True):
        objective = Objective(adapted(linear_model()), example_loss(loss, LabelKind(CLASSES, form)), preprocess)

        def mean_loss(params: Any) -> jax.Array:
            images = preprocess(batch, train=True, key=None).images[:19]
            return jnp.average(loss(objective.predict(params, {}, images), label[:19]), weights=weight[:19])

        for devices in (1, 4):
            (params, after), (sums,), _ = train_steps(objective, Way(topology_of(devices)), [batch])
            expected, grads = jax.value_and_grad(mean_loss)(params)
            assert sums.means()["loss"] == pytest.approx(float(expected), abs=1e-12)
            updated = jax.tree.map(lambda value, grad: value - 0.1 * grad, params, grads)
            assert largest_difference(after, updated) < 1e-12


RECIPE = """
import jax, optax
from jaxddp.config import load
from small_recipe import get_model

def get_config():
    return load("digits").replace(model={"width": 4}, train={"batch_size": 6, "duration": "2 steps"})

def get_loss(config):
    def loss(outputs, targets):
        grade = optax.softmax_cross_entropy(outputs[:, :2], targets[:, :2])
        return grade + optax.huber_loss(outputs[:, 2], targets[:, 2])
    return loss
"""


@pytest.mark.slow
def test_a_run_of_numbers_predicts_a_column_for_each_and_has_heads_of_two_kinds(folder, capfd):
    (folder / "heads.py").write_text(RECIPE)
    rows = [(f"{row}.png", row % 2, 1 - row % 2, NUMBERS[row, 1]) for row in range(24)]
    write_table(folder / "t.csv", "path,even,fold,age", rows)
    data = f"--data.path {folder / 't.csv'} --data.val-share 0.25 --data.targets numbers --data.image-size 8"
    run, out = folder / "run", folder / "p.csv"
    data += " --data.columns image=path,label=even,label=fold,label=age"
    words = f"{folder / 'heads.py'} {data} --eval.metrics mae,r2 --workdir {run}"
    main(["train", *words.split(), *LEAN])
    assert "18 examples | t.csv: image=path, 3 columns of numbers (even, fold, age)" in capfd.readouterr().out
    main(["predict", str(run), str(folder / "0.png"), str(folder / "1.png"), "--out", str(out)])
    with out.open() as file:
        written = [*csv.DictReader(file)]
    trained = jaxddp.load_run(run)
    predictions = trained.predict([folder / "0.png", folder / "1.png"])
    assert [*written[0]] == ["id", "even", "fold", "age", "error"] and predictions.form == "numbers"
    numbers = np.array([[row[name] for name in ("even", "fold", "age")] for row in written], np.float32)
    np.testing.assert_array_equal(numbers, predictions.probabilities)
    logits = trained.logits(trained.source([folder / "0.png", folder / "1.png"]))
    np.testing.assert_array_equal(predictions.probabilities, logits)
    with pytest.raises(InputError, match="predicts numbers"):
        _ = predictions.classes
    write_out_of_fold([run], out)
    assert out.read_text().splitlines()[0] == "id,even,fold,age,error,label,known_fold"
    for options, message in (
        ("train digits {data}", "loss.name=cross_entropy takes one label or shares per image, but the data have"),
        ("train digits {data} --loss.name mse", "eval.metrics: top1 takes one label or shares per image, but the d"),
        ("train digits {data} --loss.name mse --train.label-smoothing 0.1", "--train.label-smoothing 0.1: the labels"),
        (
            "train digits {data} --data.targets shares --loss.name bce --train.label-smoothing 0.1",
            "--train.label-smoothing 0.1: the labels are shares; set it to 0",
        ),
        ("eval {run} --per-class", "--per-class takes one label per image, but the data have numbers"),
        ("predict {run} {run}/../0.png --out a.csv --min-confidence 0.5", "--format kaggle, --min-confidence, --expl"),
    ):
        assert fails(options.format(data=data, run=run).split(), capfd).startswith(f"jaxddp: {message.format(run=run)}")
