"""Probes of features equal scikit-learn's classifiers and a vote by hand, and refuse files that do not fit."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.errors import error_line
from support.runs import fails

from jaxddp.cli import main
from jaxddp.core.errors import InputError
from jaxddp.data.source import Labels
from jaxddp.inference import probes
from jaxddp.inference.predictions import FeatureColumns, LabelledFeatures, read_features, write_feature_rows
from jaxddp.inference.probes import knn, linear

RNG = np.random.default_rng(0)
CENTERS = RNG.normal(size=(3, 6))


def clusters(count: int, seed: int) -> LabelledFeatures:
    """Return features that overlap, so that no classifier is always right."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    features = (CENTERS[labels] + rng.normal(scale=0.9, size=(count, 6))).astype(np.float32)
    return LabelledFeatures(Path(f"{seed}.npz"), features, labels, tuple("abc"), 0, ("run step 1", ""))


TRAIN, VAL = clusters(120, 1), clusters(60, 2)


def write(path: Path, features: np.ndarray, labels: np.ndarray | None = None, **changes) -> Path:
    """Write a feature file of images without faults."""
    count, known = len(features), ("a", "b", "c")
    values = np.full(count, -1) if labels is None else labels
    own = Labels(np.asarray(values, np.int32), *(() if labels is None else known for _ in range(2)))
    ids, of_classes = [*map(str, range(count))], changes.pop("classes", own)
    columns = FeatureColumns(ids, of_classes, features.shape[1:], "", "run step 1")
    rows = ((row, None) for row in features.astype(np.float32))
    form: Any = path.suffix[1:]
    with path.open("wb") as file:
        write_feature_rows(file, form, dataclasses.replace(columns, **changes), rows)
    return path


@pytest.mark.parametrize("neighbours", [1, 7, 20])
def test_knn_equals_the_weighted_vote_by_hand(neighbours):
    unit = [file.features / np.linalg.norm(file.features, axis=1, keepdims=True) for file in (TRAIN, VAL)]
    expected = []
    for row in unit[1] @ unit[0].T:
        nearest = np.argsort(-row)[:neighbours]
        votes = np.zeros(3)
        np.add.at(votes, TRAIN.labels[nearest], np.exp(row[nearest] / 0.07))
        expected.append(votes.argmax())
    probe = knn(TRAIN, VAL, neighbours)
    assert probe.predictions.tolist() == expected
    assert probe.top1 == np.mean(np.array(expected) == VAL.labels) and 0.4 < probe.top1 < 1
    assert probe.settings == f"k {neighbours}, temperature 0.07"


@pytest.mark.slow
def test_the_linear_probe_equals_scikit_learns_regression_with_the_chosen_strength(monkeypatch):
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    any_scales = np.array([1e-3, 1, 1e3, 1, 1, 50], np.float32)
    train, val = (dataclasses.replace(file, features=file.features * any_scales + 7) for file in (TRAIN, VAL))
    limits: Any = []
    monkeypatch.setattr("threadpoolctl.threadpool_limits", lambda most: limits.append(most) or monkeypatch.context())
    probe = linear(train, val)
    strength = float(probe.settings.split(",")[0].removeprefix("C "))
    assert strength in probes.STRENGTHS and probe.settings.endswith(", chosen on 12 held-out training images")
    scaler = StandardScaler().fit(train.features)
    regression = LogisticRegression(C=strength, max_iter=1000).fit(scaler.transform(train.features), train.labels)
    assert probe.predictions.tolist() == regression.predict(scaler.transform(val.features)).tolist()
    assert probe.top1 == np.mean(probe.predictions == val.labels) > 0.6 and limits == [1]
    # The strength is chosen on training images alone.
    shuffled = linear(train, dataclasses.replace(val, labels=np.roll(val.labels, 1)))
    assert shuffled.settings == probe.settings and shuffled.predictions.tolist() == probe.predictions.tolist()


@pytest.mark.parametrize("form", ["npz", "parquet"])
def test_files_are_read_as_they_were_written_without_unusable_images(tmp_path, form):
    features, labels = TRAIN.features.reshape(-1, 2, 3).copy(), TRAIN.labels.copy()
    features[3, 0, 1], labels[5] = np.nan, -1
    read = read_features(write(tmp_path / f"f.{form}", features, labels))
    kept = np.delete(np.arange(120), [3, 5])
    assert np.array_equal(read.features, TRAIN.features[kept]) and np.array_equal(read.labels, TRAIN.labels[kept])
    assert read.omitted == 2 and read.class_ids == ("a", "b", "c") and read.network == ("run step 1", "")


@pytest.mark.slow
def test_the_command_prints_the_accuracy_and_what_it_used(tmp_path, capfd):
    features = TRAIN.features.copy()
    features[0] = np.nan
    train = write(tmp_path / "train.npz", features, TRAIN.labels)
    val = write(tmp_path / "val.parquet", VAL.features, VAL.labels)
    assert main(["probe", str(train), str(val), "--neighbours", "5"]) == 0
    top1 = knn(read_features(train), read_features(val), 5).top1
    assert capfd.readouterr().out.splitlines() == [
        f"knn: top-1 {top1:.2%} of 60 images, 119 training images (k 5, temperature 0.07)",
        f"{train}: 1 image without features or label left out",
    ]
    assert main(["probe", str(train), str(val), "--method", "linear"]) == 0
    assert f"linear: top-1 {linear(read_features(train), VAL).top1:.2%} of 60 images" in capfd.readouterr().out


def other(**changes) -> LabelledFeatures:
    return dataclasses.replace(VAL, **changes)


@pytest.mark.parametrize(
    ("val", "message"),
    [
        (other(network=("other step 1", "")), "2.npz: is of another network than 1.npz: other step 1, not run step 1;"),
        (other(network=("run step 1", "fc")), "2.npz: is of another layer than 1.npz: fc, not the default; compute"),
        (other(features=VAL.features[:, :5]), "2.npz: is of another size than 1.npz: 5 features, not 6 features;"),
        (other(class_ids=tuple("abd")), "2.npz: has other classes than 1.npz; give two splits of one data set"),
    ],
)
def test_files_that_cannot_be_compared_are_refused(val, message):
    for probe in (knn, linear):
        assert message in error_line(probe, TRAIN, val)


@pytest.mark.slow
def test_too_few_training_images_are_refused():
    few = dataclasses.replace(TRAIN, features=TRAIN.features[:9], labels=TRAIN.labels[:9])
    with pytest.raises(InputError, match="--neighbours 10: 1.npz has 9 usable images"):
        knn(few, VAL, 10)
    for train in (few, dataclasses.replace(TRAIN, labels=np.zeros(120, np.int64))):
        with pytest.raises(InputError, match="1.npz: a linear probe needs at least 10 images, of at least 2 classes"):
            linear(train, VAL)
    # A class with a single image is allowed, also in a row that would be held out.
    for labels in (np.where(np.arange(120) == 0, 2, TRAIN.labels % 2), np.where(np.arange(120) == 48, 1, 0)):
        assert linear(dataclasses.replace(TRAIN, labels=labels), VAL).top1 > 0.2


def test_files_without_usable_features_and_labels_are_refused(tmp_path, capfd):
    good = write(tmp_path / "good.npz", TRAIN.features, TRAIN.labels)
    several = Labels(np.eye(3, dtype=np.uint8)[TRAIN.labels], tuple("abc"), tuple("abc"))
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "own.npz", images=np.zeros(3))
    (tmp_path / "text.parquet").write_text("no table")
    for path, message in (
        (tmp_path / "absent.npz", "absent.npz: no such file; give a file that `jaxddp features` wrote"),
        (tmp_path / "text.npz", "text.npz: damaged (File is not a zip file); give a file that `jaxddp features` wrote"),
        (tmp_path / "text.parquet", "text.parquet: damaged ("),
        (tmp_path / "own.npz", "own.npz: is no feature file: it has no features; give a file"),
        (write(tmp_path / "none.npz", TRAIN.features), "none.npz: its images have no labels, which a probe"),
        (write(tmp_path / "few.npz", TRAIN.features, TRAIN.labels + 9), "few.npz: damaged (its labels are not those"),
        (write(tmp_path / "some.npz", TRAIN.features, classes=several), "may have several labels or numbers, and"),
        (write(tmp_path / "nan.npz", np.nan * TRAIN.features, TRAIN.labels), "nan.npz: has no image with features and"),
    ):
        assert message in fails(["probe", str(good), str(path)], capfd)
    line = fails(["probe", str(good), str(good), "--method", "linear", "--neighbours", "3"], capfd)
    assert line == "jaxddp: --neighbours 3: applies to --method knn only; leave it out"
