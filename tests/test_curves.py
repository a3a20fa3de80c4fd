"""The history of a simulated run, and its curves."""

import math

import numpy as np
import pytest
from support.listeners import drive, evaluation_record, step_record

from jaxddp.training import events, pictures
from jaxddp.training.events import EvaluationRecord, StepRecord
from jaxddp.training.listeners.jsonl import History


def test_history_stores_metrics_as_arrays() -> None:
    history = History()
    drive(history)
    np.testing.assert_array_equal(history.train["loss"], math.pi / np.arange(1, 11))
    assert history.train["step"].dtype == np.int64
    assert not [name for name in history.train if name.startswith("epoch_")]
    np.testing.assert_array_equal(history.epochs["step"], [4, 7, 10])
    np.testing.assert_array_equal(history.epochs["loss"], [4 / 4, 4 / 7, 4 / 10])
    np.testing.assert_array_equal(history.epochs["seconds"], [7.25] * 3)
    np.testing.assert_array_equal(history.val["top1"], [4 / 17, 10 / 17])
    assert repr(history) == "History(10 logged steps, 3 epochs, 2 evaluations: val loss 0.2718, top-1 58.82%)"


def test_history_of_a_resumed_run_equals_that_of_an_uninterrupted_run_and_a_new_run_clears_it() -> None:
    uninterrupted, resumed = History(), History()
    drive(uninterrupted)
    drive(resumed, stop=8)
    drive(resumed, start=5)
    for series in ("train", "epochs", "val"):
        expected, actual = getattr(uninterrupted, series), getattr(resumed, series)
        assert list(expected) == list(actual)
        for name in expected:
            np.testing.assert_array_equal(actual[name], expected[name])
    uninterrupted.evaluation(EvaluationRecord(0, 0.0, {"loss": 2.3}, 77, 77, 1.0))
    drive(uninterrupted, stop=2)
    np.testing.assert_array_equal(uninterrupted.train["step"], [1, 2])
    assert uninterrupted.val == {}


def test_curves_show_the_metrics_of_the_history() -> None:
    history = History()
    drive(history)
    loss, speed, top1, rate = (
        next(axes for axes in history.plot().axes if axes.get_title(loc="left") == title)
        for title in ("loss", "images/s", "top-1 accuracy", "learning rate")
    )
    for axes, name in ((loss, "loss"), (top1, "top1")):
        for line, part in zip(axes.lines, (history.train, history.epochs, history.val), strict=True):
            np.testing.assert_array_equal(line.get_xdata(), part["epoch"])
            np.testing.assert_array_equal(line.get_ydata(), part[name])
    np.testing.assert_array_equal(rate.lines[0].get_ydata(), history.train["learning_rate"])
    np.testing.assert_array_equal(speed.lines[0].get_ydata(), history.train["images_per_second"])
    assert [text.get_text() for text in loss.texts] == ["val 0.2718", "train 0.4"]
    assert [text.get_text() for text in top1.texts] == ["val 58.8%", "train 90.9%"]


def test_labels_of_lines_that_end_at_the_same_height_do_not_overlap() -> None:
    history = History()
    drive(history)
    val = {**history.val, "loss": history.val["loss"] * 0 + history.epochs["loss"][-1]}
    picture = pictures.figure(events.Series(history.train, history.epochs, val, {}))
    assert np.diff(sorted(text.get_position()[1] for text in picture.axes[0].texts)) == pytest.approx([0.06])
    rising, perfect = ({"epoch": np.arange(1.0, 3.0), "top1": np.array([first, 1.0])} for first in (0.2, 1.0))
    labels = pictures.figure(events.Series({}, rising, rising, rising)).axes[1].texts
    assert [text.get_position()[1] for text in labels] == pytest.approx([0.88, 0.94, 1])
    axes = pictures.figure(events.Series({}, perfect, perfect, {})).axes[1]
    assert max(tick for tick in axes.get_yticks() if tick <= axes.get_ylim()[1]) == 1


@pytest.mark.parametrize(
    ("records", "panels"),
    [
        ([], 2),
        ([step_record(1)], 4),
        ([step_record(1, metrics={"loss": 0.0, "top1": 0.0}, learning_rate=None, images_per_second=0.0)], 4),
        ([step_record(1, metrics={"loss": 2.0})], 2),
        ([step_record(1), step_record(2, metrics={"loss": math.nan, "top1": math.nan})], 4),
        ([evaluation_record(4)], 4),
        ([EvaluationRecord(4, 1.0, {"loss": 2.0, "mae": 60.5, "r2": -0.5}, 77, 77, 1.0)], 4),
    ],
)
def test_curves_of_very_few_points_are_drawn(records: list[StepRecord | EvaluationRecord], panels: int) -> None:
    history = History()
    assert repr(history) == "History(0 logged steps, 0 epochs, 0 evaluations)" and history._repr_png_() is None
    for record in records:
        history.step(record) if isinstance(record, StepRecord) else history.evaluation(record)
    picture = history.plot()
    assert len(picture.axes) == panels
    assert picture._repr_png_().startswith(b"\x89PNG")
    point_counts = [np.isfinite(line.get_ydata()).sum() for line in picture.axes[0].lines]
    assert all(
        line.get_marker() == "o" for line, count in zip(picture.axes[0].lines, point_counts, strict=True) if count == 1
    )


def test_loss_that_falls_a_hundredfold_is_drawn_on_a_logarithmic_axis() -> None:
    def scale(last: float) -> str:
        epochs = {"epoch": np.array([1.0, 2.0]), "loss": np.array([2.0, last])}
        return pictures.figure(events.Series({}, epochs, {}, {})).axes[0].get_yscale()

    assert [scale(0.001), scale(0.1), scale(0.0), scale(-1.0)] == ["log", "linear", "linear", "linear"]
