"""The map of features in a report: its points, its sample of images, and what is left out."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from support.data import random_table, write_arrays
from support.reports import HOSTILE, outcome_of_noise
from support.runs import LEAN, train_words

from jaxddp.cli import main
from jaxddp.core.errors import InputError
from jaxddp.reports.classes import MOST_IMAGES, chosen_rows, feature_map, project, traces

RNG = np.random.default_rng(0)


@pytest.mark.slow
def test_similar_features_are_close_together_and_the_map_is_the_same_again():
    labels = np.repeat(np.arange(3), 20)
    features = (8 * np.eye(3, 12)[labels] + RNG.normal(size=(60, 12))).astype(np.float32)
    method, points = project(features)
    assert method == "t-SNE (scikit-learn; perplexity 19.7, seed 0)" and points.shape == (60, 2)
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert (labels[distances.argmin(1)] == labels).all()
    assert np.array_equal(project(features)[1], points)


@pytest.mark.parametrize("shape", [(5, 1), (6, 2)])
def test_few_images_and_few_features_have_a_map(shape):
    _, points = project(RNG.normal(size=shape).astype(np.float32))
    assert points.shape == (shape[0], 2) and np.isfinite(points).all()


def test_umap_is_used_if_it_is_installed(monkeypatch):
    made = []

    class UMAP:
        def __init__(self, **settings):
            made.append(settings)

        def fit_transform(self, features):
            return features[:, :2]

    stand_in = ModuleType("umap")
    stand_in.__spec__ = ModuleSpec("umap", None)
    monkeypatch.setattr(stand_in, "UMAP", UMAP, raising=False)
    monkeypatch.setitem(sys.modules, "umap", stand_in)
    features = RNG.normal(size=(9, 4))
    method, points = project(features)
    assert method == "UMAP (umap-learn; 8 neighbours, seed 0)" and np.array_equal(points, features[:, :2])
    assert made == [{"n_neighbors": 8, "random_state": 0, "n_jobs": 1}]


def test_at_most_two_thousand_images_are_drawn_each_once():
    known = np.arange(10, 5010)
    rows = chosen_rows(known)
    assert len(rows) == MOST_IMAGES == len({*rows.tolist()}) and (np.diff(rows) > 0).all()
    assert {*rows.tolist()} <= {*known.tolist()} and np.array_equal(chosen_rows(known), rows)
    assert abs(rows.mean() - known.mean()) < 100
    assert np.array_equal(chosen_rows(known[:50]), known[:50])


def test_each_class_is_a_trace_and_wrong_predictions_are_crosses():
    points, labels, guesses = RNG.normal(size=(6, 2)), np.array([0, 2, 0, 2, 2, 0]), np.array([0, 2, 2, 2, 0, 0])
    names = [f"{row}.jpg" for row in range(5)] + [HOSTILE]
    data = traces(points, labels, guesses, names, ("cat, Felis", "bird", "dog"))
    assert [trace["name"] for trace in data] == ["cat", "dog"]
    assert data[0]["marker"]["symbol"] == ["circle", "x", "circle"]
    shown = ["0.jpg<br>cat, Felis, taken for cat, Felis", "2.jpg<br>cat, Felis, taken for dog"]
    assert data[0]["hovertext"][:2] == shown
    assert "<script>" not in data[0]["hovertext"][2]
    assert np.allclose(data[1]["x"], points[[1, 3, 4], 0], rtol=1e-6)
    many = traces(points, labels, guesses, names, tuple(f"{label}" for label in range(30)))
    assert many[0]["marker"]["color"] != many[1]["marker"]["color"]


@pytest.mark.slow
def test_the_note_has_the_number_of_images_and_of_the_sample(monkeypatch):
    images = outcome_of_noise(60)
    drawn = feature_map(3, images)
    assert drawn.chart.id == "features-3" and "features of 60 validation images. A cross" in drawn.note
    assert sum(len(trace["x"]) for trace in drawn.chart.data) == 60
    monkeypatch.setattr("jaxddp.reports.classes.MOST_IMAGES", 20)
    assert "features of 20 validation images, a random sample of 60. A cross" in feature_map(0, images).note


def test_a_map_needs_five_images_with_finite_features():
    images = outcome_of_noise(60)
    broken = SimpleNamespace(features=lambda source: np.full((len(source), 3), np.nan, np.float32))
    with pytest.raises(InputError, match="there are 0 images with features; 5 are needed"):
        feature_map(0, images._replace(run=broken))


@pytest.mark.ci
def test_a_report_has_the_map_of_each_run_or_the_reason_without(tmp_path, monkeypatch, capfd):
    data = write_arrays(tmp_path / "images.npz", random_table(16, image=16), random_table(12, seed=1, image=16))
    run, out = tmp_path / "run", tmp_path / "report.html"
    assert main(train_words(data, run, *LEAN, "--train.duration", "1 step")) == 0
    assert main(["report", str(run), "--out", str(out), "--features"]) == 0
    page = out.read_text()
    assert 'id="features-0"' in page and "features of 12 validation images" in page

    def refuse(number, images):
        raise InputError("its layers cannot be read")

    monkeypatch.setattr("jaxddp.reports.classes.feature_map", refuse)
    capfd.readouterr()
    assert main(["report", str(run), "--out", str(out), "--features"]) == 0
    assert "run: its features are left out: its layers cannot be read" in capfd.readouterr().out
    page = out.read_text()
    assert 'id="features-0"' not in page and 'id="matrix-0"' in page
