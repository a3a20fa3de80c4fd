"""What the listeners write and show, from the same invented run: records in, files and lines out."""

import gc
import io
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import nbformat
import numpy as np
import pexpect
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from nbclient import NotebookClient

import jaxddp.files as files
from jaxddp.errors import InputError
from jaxddp.training import pictures as curves
from jaxddp.training import rows
from jaxddp.training.events import EpochMetrics, EvaluationRecord, Listener, RunEnd, RunStart, StepRecord, Used
from jaxddp.training.listeners import curves as curves_file
from jaxddp.training.listeners import display as screen
from jaxddp.training.listeners import lines, tensorboard
from jaxddp.training.listeners import parameters as overview
from jaxddp.training.listeners.display import PlainLines
from jaxddp.training.listeners.history import History
from jaxddp.training.listeners.jsonl import JsonLines
from jaxddp.training.shown import Shown

BATCH, EXAMPLES, TOTAL = 32, 100, 10  # epochs end at steps 4, 7 and 10


def run_start(start_step: int = 0, **changes: object) -> RunStart:
    known = {"total_steps": TOTAL, "batch_size": BATCH, "num_examples": EXAMPLES, "devices": 4, "processes": 2}
    return RunStart(**{"start_step": start_step, **known, **changes})


def step_record(step: int, **changes: object) -> StepRecord:
    epoch = step * BATCH / EXAMPLES
    ends = {4: 1, 7: 2, 10: 3}
    end = EpochMetrics(ends[step], {"loss": 4 / step, "top1": step / 11}, 7.25) if step in ends else None
    metrics = {"loss": math.pi / step, "top1": step / 13, "top5": step / 12}
    known = {"metrics": metrics, "learning_rate": 0.1 / 3, "images_per_second": 1234.5, "data_wait_fraction": 1 / 7}
    return StepRecord(**{"step": step, "epoch": epoch, **known, "epoch_end": end, **changes})


def evaluation_record(step: int, seen: int = 77, **changes: object) -> EvaluationRecord:
    metrics = {"loss": math.e / step, "top1": step / 17}
    known = {"metrics": metrics, "seen": seen, "total": 77, "seconds": 2.5}
    return EvaluationRecord(**{"step": step, "epoch": step * BATCH / EXAMPLES, **known, **changes})


def drive(*listeners: Listener, start: int = 0, stop: int = TOTAL, evaluate: tuple[int, ...] = (4, 10)) -> None:
    """Steps after `start`, up to `stop`; a run that stops early is killed there and has no end."""
    for listener in listeners:
        listener.start(run_start(start))
    for step in range(start + 1, stop + 1):
        for listener in listeners:
            listener.step(step_record(step))
        for seen in (32, 64, 77) if step in evaluate else ():
            for listener in listeners:
                listener.evaluation(evaluation_record(step, seen))
    if stop == TOTAL:
        validation = {"loss": math.e / TOTAL, "top1": TOTAL / 17, "count": 77} if TOTAL in evaluate else {}
        for listener in listeners:
            listener.end(RunEnd("done", TOTAL, 90.0, validation))


def strict_json(line: str) -> dict[str, object]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def metrics_lines(directory: Path) -> list[dict[str, object]]:
    return [strict_json(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


# metrics.jsonl and result.json


def test_metrics_lines_hold_every_figure_with_all_its_digits(tmp_path: Path) -> None:
    drive(JsonLines(tmp_path))
    written = metrics_lines(tmp_path)
    assert [(row["step"], row["split"]) for row in written] == [
        *((step, "train") for step in (1, 2, 3, 4)),
        (4, "val"),
        *((step, "train") for step in (5, 6, 7, 8, 9, 10)),
        (10, "val"),
    ]
    assert written[1] == {
        "step": 2,
        "epoch": 0.64,
        "split": "train",
        "loss": math.pi / 2,
        "top1": 2 / 13,
        "top5": 2 / 12,
        "learning_rate": 0.1 / 3,
        "images_per_second": 1234.5,
        "data_wait_fraction": 1 / 7,
    }
    assert written[3].items() >= {"epoch_loss": 1.0, "epoch_top1": 4 / 11, "epoch_seconds": 7.25}.items()
    validation = {"loss": math.e / 4, "top1": 4 / 17, "count": 77, "seconds": 2.5}
    assert written[4] == {"step": 4, "epoch": 1.28, "split": "val", **validation}


def test_numpy_figures_keep_their_digits_and_their_loss_scale(tmp_path: Path) -> None:
    listener = JsonLines(tmp_path)
    listener.start(run_start())
    loss = np.float32(0.1)
    listener.step(step_record(1, metrics={"loss": loss, "loss_scale": np.float32(32768)}, learning_rate=None))
    (row,) = metrics_lines(tmp_path)
    assert np.float32(row["loss"]) == loss
    assert row["loss_scale"] == 32768
    assert "learning_rate" not in row


USED = Used(flops_per_step=24 * 10**12, flops_utilization=0.41234, peak_memory=12_345_678_901)


def test_what_the_devices_did_is_in_the_line_and_in_the_result_where_it_is_known(tmp_path: Path) -> None:
    listener = JsonLines(tmp_path)
    listener.start(run_start())
    listener.step(step_record(1, used=USED))
    listener.step(step_record(2, used=Used(peak_memory=7)))
    listener.end(RunEnd("done", 2, 1.0, used=USED))
    first, second = metrics_lines(tmp_path)
    assert (first["flops_utilization"], first["peak_memory"]) == (0.41234, 12_345_678_901)
    assert "flops_per_step" not in first
    assert "flops_utilization" not in second and second["peak_memory"] == 7
    result = strict_json((tmp_path / "result.json").read_text())
    known = {"flops_per_step": 24 * 10**12, "flops_utilization": 0.41234, "peak_memory": 12_345_678_901}
    assert result == {"status": "done", "step": 2, "devices": 4, "processes": 2, "val": None, **known}


def test_the_screen_shows_a_utilization_where_there_is_one_and_the_memory_at_the_end() -> None:
    assert lines.pace(step_record(1, used=USED)) == "lr 0.03333  1,234 images/s  MFU 41.2%  data wait 14%"
    assert lines.pace(step_record(1, used=Used(peak_memory=7))) == "lr 0.03333  1,234 images/s  data wait 14%"
    assert (
        lines.closing(RunEnd("done", 9, 61.0, used=USED)) == "done at step 9 after 1:01  MFU 41.2%  peak memory 12 GB"
    )


def test_figures_that_are_not_finite_are_null(tmp_path: Path) -> None:
    listener = JsonLines(tmp_path)
    listener.start(run_start())
    listener.step(step_record(1, metrics={"loss": math.nan, "top1": -math.inf}))
    listener.end(RunEnd("failed", 1, 1.0, {"loss": math.inf, "top1": 0.5, "count": 3.0}, reason="the loss is nan"))
    (row,) = metrics_lines(tmp_path)
    assert row["loss"] is None
    assert row["top1"] is None
    result = strict_json((tmp_path / "result.json").read_text())
    assert result["val"] == {"loss": None, "top1": 0.5, "count": 3}
    assert result["reason"] == "the loss is nan"
    assert np.isnan(rows.series(row for _, row in rows.parse(tmp_path / "metrics.jsonl")).train["loss"]).all()


def test_a_line_is_readable_before_the_next_step(tmp_path: Path) -> None:
    listener = JsonLines(tmp_path)
    listener.start(run_start())
    for step in (1, 2, 3):
        listener.step(step_record(step))
        assert [row["step"] for row in metrics_lines(tmp_path)] == list(range(1, step + 1))


def test_result_says_how_the_run_ended(tmp_path: Path) -> None:
    drive(JsonLines(tmp_path))
    assert strict_json((tmp_path / "result.json").read_text()) == {
        "status": "done",
        "step": 10,
        "devices": 4,
        "processes": 2,
        "val": {"loss": math.e / 10, "top1": 10 / 17, "count": 77},
    }


def test_result_of_a_resumed_run_keeps_the_last_evaluation(tmp_path: Path) -> None:
    drive(JsonLines(tmp_path), stop=6)
    drive(JsonLines(tmp_path), start=5, evaluate=())
    assert strict_json((tmp_path / "result.json").read_text())["val"] == {
        "loss": math.e / 4,
        "top1": 4 / 17,
        "count": 77,
    }


def test_a_validation_that_a_resumed_run_comes_to_again_has_one_line(tmp_path: Path) -> None:
    drive(JsonLines(tmp_path), stop=4)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    resumed = JsonLines(tmp_path)
    resumed.start(run_start(4))
    resumed.evaluation(evaluation_record(4, 77))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    resumed.evaluation(evaluation_record(4, 77, split="test"))
    assert [line["split"] for line in metrics_lines(tmp_path)[-2:]] == ["val", "test"]


def test_result_of_a_resumed_run_keeps_an_evaluation_that_was_not_finite(tmp_path: Path) -> None:
    first = JsonLines(tmp_path)
    first.start(run_start(0))
    first.evaluation(evaluation_record(4, metrics={"loss": math.nan, "top1": 0.5}))
    drive(JsonLines(tmp_path), start=5, evaluate=())
    result = strict_json((tmp_path / "result.json").read_text())
    assert result["val"] == {"loss": None, "top1": 0.5, "count": 77}


def test_a_run_that_trains_nothing_more_leaves_its_result(tmp_path: Path) -> None:
    drive(JsonLines(tmp_path))
    before = (tmp_path / "result.json").read_bytes()
    again = JsonLines(tmp_path)
    again.start(run_start(TOTAL, devices=7))
    assert not (tmp_path / "result.json").exists()
    again.end(RunEnd("done", TOTAL, 0.1, {}))
    assert (tmp_path / "result.json").read_bytes() == before
    again.start(run_start(TOTAL, devices=7))
    again.step(step_record(TOTAL + 1))
    again.end(RunEnd("done", TOTAL + 1, 0.1, {}))
    assert strict_json((tmp_path / "result.json").read_text())["devices"] == 7


def test_result_has_no_val_where_nothing_was_evaluated(tmp_path: Path) -> None:
    drive(JsonLines(tmp_path), evaluate=())
    assert strict_json((tmp_path / "result.json").read_text())["val"] is None


@settings(max_examples=40)
@example(killed=5, back=1, torn=b'{"step": 6, "lo')
@example(killed=5, back=0, torn=b"\0\r\0")
@given(
    killed=st.integers(1, TOTAL - 1),
    back=st.integers(0, 3),
    torn=st.binary(max_size=9).filter(lambda tail: b"\n" not in tail),
)
def test_a_killed_and_resumed_run_writes_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, killed: int, back: int, torn: bytes
) -> None:
    whole, resumed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("resumed")
    drive(JsonLines(whole))
    drive(JsonLines(resumed), stop=killed)
    with (resumed / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    drive(JsonLines(resumed), start=max(1, killed - back))
    for name in ("metrics.jsonl", "result.json"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()


def test_resuming_leaves_a_file_alone_that_needs_no_cut(tmp_path: Path) -> None:
    spaced = b'{ "step":3 ,"split" : "train"}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(spaced)
    before = path.stat()
    JsonLines(tmp_path).start(run_start(3))
    assert path.read_bytes() == spaced
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    JsonLines(tmp_path).start(run_start(2))
    assert path.read_bytes() == b""


def test_a_fresh_run_begins_both_files_anew(tmp_path: Path) -> None:
    drive(JsonLines(tmp_path))
    JsonLines(tmp_path).start(run_start())
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("line", [b"hello\n", b'{"split": "train"}\n', b"[1]\n", b'{"step": "1", "split": "val"}\n'])
def test_a_foreign_line_is_named_and_nothing_is_lost(tmp_path: Path, line: bytes) -> None:
    content = b'{"step": 1, "split": "train"}\n' + line + b'{"step": 3, "split": "train"}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(f"{path}:2: not a JSON object with a step and a split")):
        JsonLines(tmp_path).start(run_start(1))
    assert path.read_bytes() == content


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = JsonLines(tmp_path)
    listener.start(run_start())
    path = tmp_path / "metrics.jsonl"
    full = Path("/dev/full").open("ab")  # noqa: SIM115
    monkeypatch.setattr("jaxddp.files.open_regular", lambda *_: full)
    with pytest.raises(InputError, match=re.escape(f"{path}: cannot be written (No space left on device); free some")):
        listener.step(step_record(1))


def test_a_work_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/run: cannot be written \(Not a directory\); choose another place"):
        JsonLines(tmp_path / "file" / "run").start(run_start())
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(InputError, match=r"metrics.jsonl: cannot be written \(Is a directory\)"):
        JsonLines(tmp_path / "run").start(run_start())


def test_a_replacement_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    files.replace(path, b"old")

    def full(handle: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=re.escape(f"{path}: cannot be written (No space left on device)")):
        files.replace(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    assert path.read_bytes() == b"old"


def test_reading_metrics_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"metrics.jsonl: cannot be read \(No such file or directory\)"):
        curves_file.draw(tmp_path / "metrics.jsonl", tmp_path / "curves.png")


# The history and the curves


def test_history_holds_the_figures_as_arrays() -> None:
    history = History()
    drive(history)
    np.testing.assert_array_equal(history.train["loss"], math.pi / np.arange(1, 11))
    assert history.train["step"].dtype == np.int64
    assert not [name for name in history.train if name.startswith("epoch_")]
    np.testing.assert_array_equal(history.epochs["step"], [4, 7, 10])
    np.testing.assert_array_equal(history.epochs["loss"], [4 / 4, 4 / 7, 4 / 10])
    np.testing.assert_array_equal(history.epochs["seconds"], [7.25] * 3)
    np.testing.assert_array_equal(history.val["top1"], [4 / 17, 10 / 17])
    assert repr(history) == "History(10 logged steps, 3 epochs, 2 evaluations: val loss 0.2718, top1 0.5882)"


def test_history_of_a_resumed_run_equals_the_whole_one_and_a_fresh_run_begins_anew() -> None:
    whole, resumed = History(), History()
    drive(whole)
    drive(resumed, stop=8)
    drive(resumed, start=5)
    for part in ("train", "epochs", "val"):
        expected, got = getattr(whole, part), getattr(resumed, part)
        assert list(expected) == list(got)
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name])
    whole.evaluation(EvaluationRecord(0, 0.0, {"loss": 2.3}, 77, 77, 1.0))
    drive(whole, stop=2)
    np.testing.assert_array_equal(whole.train["step"], [1, 2])
    assert whole.val == {}


def test_an_empty_history_says_so() -> None:
    history = History()
    assert history.train == history.val == history.epochs == {}
    assert repr(history) == "History(0 logged steps, 0 epochs, 0 evaluations)"
    assert history._repr_png_() is None


def test_curves_show_the_figures() -> None:
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
    assert [text.get_text() for text in loss.texts] == ["val 0.272", "train 0.4"]
    assert [text.get_text() for text in top1.texts] == ["val 58.8%", "train 90.9%"]


def test_labels_of_lines_that_end_together_do_not_touch() -> None:
    history = History()
    drive(history)
    val = {**history.val, "loss": history.val["loss"] * 0 + history.epochs["loss"][-1]}
    picture = curves.figure(rows.Series(history.train, history.epochs, val, {}))
    heights = sorted(text.get_position()[1] for text in picture.axes[0].texts)
    assert np.diff(heights) == pytest.approx([curves.LABEL_GAP])


@pytest.mark.parametrize(
    ("records", "panels"),
    [
        ([], 2),
        ([step_record(1)], 4),
        ([step_record(1, metrics={"loss": 0.0, "top1": 0.0}, learning_rate=None, images_per_second=0.0)], 4),
        ([step_record(1, metrics={"loss": 2.0})], 2),
        ([step_record(step) for step in (1, 2, 3)], 4),
        ([step_record(1), step_record(2, metrics={"loss": math.nan, "top1": math.nan})], 4),
        ([evaluation_record(4)], 4),
    ],
    ids=["nothing", "one step", "zeros", "no accuracy", "three steps", "not finite", "only an evaluation"],
)
def test_curves_of_little(records: list[StepRecord | EvaluationRecord], panels: int) -> None:
    history = History()
    for record in records:
        history.step(record) if isinstance(record, StepRecord) else history.evaluation(record)
    picture = history.plot()
    assert len(picture.axes) == panels
    assert picture._repr_png_().startswith(b"\x89PNG")
    shown = [np.isfinite(line.get_ydata()).sum() for line in picture.axes[0].lines]
    assert all(
        line.get_marker() == "o" for line, points in zip(picture.axes[0].lines, shown, strict=True) if points == 1
    )


def test_loss_that_falls_a_hundredfold_is_drawn_on_a_logarithmic_axis() -> None:
    def scale(last: float) -> str:
        epochs = {"epoch": np.array([1.0, 2.0]), "loss": np.array([2.0, last])}
        return curves.figure(rows.Series({}, epochs, {}, {})).axes[0].get_yscale()

    assert [scale(0.001), scale(0.1), scale(0.0), scale(-1.0)] == ["log", "linear", "linear", "linear"]


def test_the_picture_of_a_resumed_run_is_whole(tmp_path: Path) -> None:
    pictures = []
    for name, stops in (("whole", (TOTAL,)), ("resumed", (6, TOTAL))):
        start = 0
        for stop in stops:
            directory = tmp_path / name
            drive(
                JsonLines(directory),
                curves_file.Curves(directory / "metrics.jsonl", directory / "curves.png"),
                start=start,
                stop=stop,
            )
            start = stop - 1
        pictures.append((tmp_path / name / "curves.png").read_bytes())
    assert pictures[0].startswith(b"\x89PNG")
    assert pictures[0] == pictures[1]


def test_no_figure_stays_in_memory(tmp_path: Path) -> None:
    """Their parts refer to each other; a collection of all objects comes seldom in a long run."""
    images, probabilities = np.zeros((2, 4, 4, 3), np.uint8), np.full((2, 5), 0.2)
    shown = Shown.of(images, np.zeros(2, int), probabilities, tuple("abcde"))
    written = JsonLines(tmp_path), tensorboard.TensorBoard(tmp_path, 2)
    drive(*written, stop=TOTAL - 1, evaluate=())
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(each, Figure) for each in gc.get_objects())
        for step in (4, 7):
            curves_file.draw(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
            written[1].evaluation(evaluation_record(step, predictions=shown))
        assert sum(isinstance(each, Figure) for each in gc.get_objects()) == before
        assert not gc.isenabled()
    finally:
        gc.enable()
        written[1].end(RunEnd("done", TOTAL, 1.0))
    curves_file.draw(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert gc.isenabled()


def test_drawing_between_takes_a_hundredth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawn = [1000.0], []

    def draw(metrics: Path, picture: Path) -> None:
        drawn.append(now[0])
        now[0] += 1

    monkeypatch.setattr(curves_file, "draw", draw)
    monkeypatch.setattr(curves_file.time, "monotonic", lambda: now[0])
    listener = curves_file.Curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    for _ in range(25):
        listener.evaluation(evaluation_record(4))
        listener.evaluation(evaluation_record(4, seen=32))
        now[0] += 10
    assert drawn == [1000.0, 1101.0, 1202.0]
    listener.end(RunEnd("done", TOTAL, 1.0))
    assert len(drawn) == 4


# Lines on a screen


def test_durations() -> None:
    seconds = (None, math.inf, 0.04, 59.94, 59.96, 61, 3599.7, 7447)
    assert [lines.duration(value) for value in seconds] == [
        "--",
        "--",
        "0.0s",
        "59.9s",
        "1:00",
        "1:01",
        "1:00:00",
        "2:04:07",
    ]


def test_figures_are_readable() -> None:
    metrics = {"loss": 0.43211, "top1": 0.85214, "top10": 1.0, "count": 5, "loss_scale": 32768.0, "tiny": 1.25e-6}
    assert lines.shown(metrics) == "loss 0.4321 top-1 85.21% top-10 100.00% loss_scale 3.277e+04 tiny 1.25e-06"


def test_time_left_counts_what_the_wall_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(lines.time, "monotonic", lambda: now[0])
    shown = lines.RunLines(lambda line: None)
    shown.start(run_start())
    assert shown.remaining(step_record(2)) == 8 * BATCH / 1234.5
    now[0] += 30
    assert shown.remaining(step_record(4)) == 6 * 15.0
    shown.start(run_start())
    assert shown.remaining(step_record(1, images_per_second=0.0)) is None


def test_an_epoch_and_the_evaluation_at_its_end_share_a_line() -> None:
    kept: list[str] = []
    epochs = lines.RunLines(kept.append)
    for step in range(1, TOTAL + 1):
        epochs.step(step_record(step))
        if step in (4, 5):
            epochs.evaluation(evaluation_record(step, seen=10))
            epochs.evaluation(evaluation_record(step))
    epochs.evaluation(evaluation_record(10, split="ema"))
    epochs.evaluation(evaluation_record(10))
    assert kept == [
        "epoch   1  train loss 1.0000 top-1 36.36%  val loss 0.6796 top-1 23.53%  7.2s",
        "step 5  epoch 1.60  val loss 0.5437 top-1 29.41%  77 in 2.5s",
        "epoch   2  train loss 0.5714 top-1 63.64%  7.2s",
        "epoch   3  train loss 0.4000 top-1 90.91%  ema loss 0.2718 top-1 58.82%  7.2s",
        "step 10  epoch 3.20  val loss 0.2718 top-1 58.82%  77 in 2.5s",
    ]


def test_an_evaluation_after_an_epoch_that_no_logged_step_parts_from_it_stands_alone() -> None:
    kept: list[str] = []
    epochs = lines.RunLines(kept.append)
    epochs.step(step_record(4))
    epochs.evaluation(evaluation_record(6))
    assert kept == [
        "epoch   1  train loss 1.0000 top-1 36.36%  7.2s",
        "step 6  epoch 1.92  val loss 0.4530 top-1 35.29%  77 in 2.5s",
    ]


def test_plain_lines_of_a_run() -> None:
    stream = io.StringIO()
    listener = PlainLines(stream)
    listener.start(run_start(2, params={"kernel": np.zeros((3, 4)), "bias": np.zeros(4)}, workdir=Path("runs/demo")))
    listener.step(step_record(3))
    listener.step(step_record(4))
    listener.step(step_record(7))
    listener.evaluation(evaluation_record(7, seen=32))
    listener.evaluation(evaluation_record(7))
    listener.end(RunEnd("preempted", 8, 61.0))
    printed = stream.getvalue().splitlines()
    assert printed[:3] == [
        "16 parameters | 100 examples | global batch 32 on 4 x cpu in 2 processes",
        "10 steps (3.2 epochs) | resuming at step 2 | writing to runs/demo",
        "step 3/10  epoch 0.96/3.2  loss 1.0472 top-1 23.08% top-5 25.00%  lr 0.03333  1,234 images/s  data wait 14%"
        "  ETA 0.2s",
    ]
    assert [line[:9] for line in printed[3:7]] == ["step 4/10", "epoch   1", "step 7/10", "epoch   2"]
    assert printed[7:] == ["preempted at step 8 after 1:01; the same command resumes it"]


WATCHED = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from test_listeners import drive
from jaxddp.training.listeners.display import progress

drive(progress(), start=2)
"""

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "TERM": "xterm-256color"}


def test_a_pipe_gets_plain_lines_even_where_colour_is_forced() -> None:
    command = [sys.executable, "-c", WATCHED]
    done = subprocess.run(command, capture_output=True, check=True, env={**ENVIRONMENT, "FORCE_COLOR": "1"})
    text = done.stdout.decode("ascii")
    assert not set(re.findall(r"[\x00-\x1f\x7f]", text)) - {"\n"}
    # Two lines to open, eight steps, three epochs (two with their evaluation), one to close.
    assert len(text.splitlines()) == 2 + 8 + 3 + 1
    assert text.splitlines()[-1] == "done at step 10 after 1:30  val loss 0.2718 top-1 58.82%"


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    program = WATCHED + "print('and more', flush=True)"
    done = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, env=ENVIRONMENT)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_terminal_gets_a_live_display_whose_epoch_lines_stay() -> None:
    child = pexpect.spawn(sys.executable, ["-c", WATCHED], dimensions=(24, 120), encoding="utf-8", env=ENVIRONMENT)
    child.expect(pexpect.EOF, timeout=60)
    child.close()
    assert child.exitstatus == 0
    raw = child.before
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).replace("\r", "\n")
    # The bar begins at the restored step, and shows time left, speed and the evaluation's own progress.
    assert re.search(r"train ━+.*step 2/10", frames)
    assert re.search(r"step 4/10  epoch 1\.28/3\.2  ETA \d", frames)
    assert re.search(r"loss 0\.7854 top-1 30\.77% .*1,234 images/s", frames)
    # What stays stands there once; the bar is erased and the cursor back in the end.
    kept = [line for line in frames.splitlines() if line.startswith(("epoch ", "done "))]
    assert kept == [
        "epoch   1  train loss 1.0000 top-1 36.36%  val loss 0.6796 top-1 23.53%  7.2s",
        "epoch   2  train loss 0.5714 top-1 63.64%  7.2s",
        "epoch   3  train loss 0.4000 top-1 90.91%  val loss 0.2718 top-1 58.82%  7.2s",
        "done at step 10 after 1:30  val loss 0.2718 top-1 58.82%",
    ]
    after_last_bar = raw[raw.rfind("━") :]
    assert "\x1b[2K" in after_last_bar
    assert "\x1b[?25h" in after_last_bar


def test_the_live_display_shows_how_far_an_evaluation_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from jaxddp.training.listeners import live as progress

    class Frames:
        def __init__(self) -> None:
            self.drawn: list[str] = []

        def draw(self, picture: object) -> None:
            console = Console(file=io.StringIO(), width=100, force_terminal=False)
            console.print(picture)
            self.drawn.append(console.file.getvalue())

        def keep(self, line: str) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(progress, "SECONDS_BETWEEN_FRAMES", 0)
    frames = Frames()
    drive(progress.LiveDisplay(frames))
    during = [frame for frame in frames.drawn if "val" in frame]
    assert [re.search(r"val .* (\d+/77  loss .*%)", frame)[1] for frame in during] == [
        "32/77  loss 0.6796 top-1 23.53%",
        "64/77  loss 0.6796 top-1 23.53%",
        "32/77  loss 0.2718 top-1 58.82%",
        "64/77  loss 0.2718 top-1 58.82%",
    ]
    assert all("train" in frame and "ETA" in frame for frame in frames.drawn)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_FRAMES", 3600)
    frames = Frames()
    drive(progress.LiveDisplay(frames))
    # Many records a second do not cost as many frames: only ends of epochs and evaluations are drawn at once.
    assert len(frames.drawn) < 10


def test_without_rich_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert type(screen.progress(Terminal())).__name__ == "LiveDisplay"
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(screen.progress(Terminal()), PlainLines)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delitem(sys.modules, "jaxddp.training.listeners.live")
    monkeypatch.delattr("jaxddp.training.listeners.live")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(screen.progress(Terminal()), PlainLines)


def test_lines_and_files_need_neither_tensorflow_nor_clu(tmp_path: Path) -> None:
    program = f"""
        import sys
        for name in ("clu", "tensorflow"):
            sys.modules[name] = None
        from pathlib import Path
        from jaxddp.training.listeners.history import History
        from jaxddp.training.listeners.jsonl import JsonLines
        from jaxddp.training.listeners.display import progress
        from jaxddp.training.events import RunStart
        history = History()
        for listener in (history, JsonLines(Path({str(tmp_path)!r})), progress()):
            listener.start(RunStart(0, 10, 32, 100, 1, 1))
        print(history)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=Path(__file__).parents[1])
    assert done.stdout.splitlines() == [
        "100 examples | global batch 32 on 1 x cpu",
        "10 steps (3.2 epochs)",
        "History(0 logged steps, 0 epochs, 0 evaluations)",
    ], done.stderr


@pytest.mark.slow
def test_a_notebook_gets_one_display_and_a_history_that_shows_itself(tmp_path: Path) -> None:
    watched = WATCHED.replace("drive(progress(), start=2)", "from jaxddp.training.listeners.history import History")
    code = watched + "history = History()\ndrive(progress(), history)\nhistory"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(code), nbformat.v4.new_code_cell("'matplotlib.pyplot' in sys.modules")]
    )
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[0].outputs
    displays = [output for output in outputs if output.output_type == "display_data"]
    assert len(displays) == 1
    assert "step 10/10" in displays[0].data["text/html"]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "epoch   3  train loss 0.4000 top-1 90.91%  val loss 0.2718 top-1 58.82%  7.2s\n" in printed
    assert "image/png" in outputs[-1].data
    assert outputs[-1].data["text/plain"].startswith("History(10 logged steps, 3 epochs, 2 evaluations")
    # Drawing left the notebook's own plotting alone.
    assert notebook.cells[1].outputs[0].data["text/plain"] == "False"


# TensorBoard and the parameter overview


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


@pytest.mark.slow
def test_tensorboard_files_hold_the_scalars(tmp_path: Path) -> None:
    drive(tensorboard.TensorBoard(tmp_path))
    found = scalars(tmp_path)
    assert found["train/loss"] == [(step, pytest.approx(math.pi / step, rel=1e-6)) for step in range(1, 11)]
    assert found["train/epoch_top1"] == [(step, pytest.approx(step / 11, rel=1e-6)) for step in (4, 7, 10)]
    assert found["train/learning_rate"][0] == (1, pytest.approx(0.1 / 3, rel=1e-6))
    assert found["val/top1"] == [(step, pytest.approx(step / 17, rel=1e-6)) for step in (4, 10)]
    assert found["val/count"] == [(4, 77.0), (10, 77.0)]

    (tmp_path / "notes.txt").write_text("mine")
    drive(tensorboard.TensorBoard(tmp_path), start=9)
    assert len(list(tmp_path.glob("events*"))) == 2
    drive(tensorboard.TensorBoard(tmp_path), evaluate=())
    assert len(list(tmp_path.glob("events*"))) == 1
    assert "val/loss" not in scalars(tmp_path)
    assert (tmp_path / "notes.txt").exists()

    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: cannot be written"):
        tensorboard.TensorBoard(tmp_path / "file").start(run_start())


def test_files_for_tensorboard_that_cannot_be_opened_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path) -> None:
        raise InputError("the disk is full")

    monkeypatch.setattr(tensorboard, "_open", refuse)
    listener = tensorboard.TensorBoard(tmp_path)
    listener.start(run_start())
    with pytest.raises(InputError, match="the disk is full"):
        listener.step(step_record(1))
    listener.end(RunEnd("failed", 1, 1.0))


def test_parameter_overview_lists_any_pytree(tmp_path: Path) -> None:
    shapes = {
        "conv": {"kernel": jax.ShapeDtypeStruct((3, 3, 8, 64), "bfloat16")},
        "head": [np.zeros((64, 10), np.float32)],
    }
    overview.ParameterOverview(tmp_path / "run").start(run_start(params=shapes))
    text = (tmp_path / "run" / "parameters.txt").read_text()
    assert re.search(r"\| conv/kernel \| \(3, 3, 8, 64\) \| bfloat16 \| 4,608 +\|", text)
    assert re.search(r"\| head/0 +\| \(64, 10\) +\| float32 +\| 640 +\|", text)
    assert text.endswith(f"Total: {4608 + 640:,} -- {4608 * 2 + 640 * 4:,} bytes\n")
    assert lines.count_parameters(shapes) == 4608 + 640
