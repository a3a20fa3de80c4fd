"""The files of a simulated run: metrics.jsonl, result.json, parameters.txt and TensorBoard's files."""

import json
import math
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.listeners import TOTAL, drive, evaluation_record, run_start, step_record

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.training import progress
from jaxddp.training.events import RunEnd, Usage
from jaxddp.training.listeners import jsonl as overview
from jaxddp.training.listeners.jsonl import JsonLines


def parsed(file: Path) -> list[dict[str, object]]:
    """Return the lines of a file, which must be JSON without NaN and Infinity."""
    return [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]


def metrics_lines(directory: Path) -> list[dict[str, object]]:
    return parsed(directory / "metrics.jsonl")


def result(directory: Path) -> dict[str, object]:
    return parsed(directory / "result.json")[0]


def test_metrics_lines_have_every_value_with_all_its_digits(tmp_path: Path) -> None:
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


def test_numpy_values_keep_their_digits_and_known_device_utilization_is_written(tmp_path: Path) -> None:
    listener, loss = JsonLines(tmp_path), np.float32(0.1)
    usage = {"flops_per_step": 24 * 10**12, "flops_utilization": 0.41234, "peak_memory": 12_345_678_901}
    listener.start(run_start())
    listener.step(step_record(1, used=Usage(**usage)))
    metrics = {"loss": loss, "loss_scale": np.float32(32768)}
    listener.step(step_record(2, metrics=metrics, learning_rate=None, used=Usage(peak_memory=7)))
    listener.end(RunEnd("done", 2, 1.0, used=Usage(**usage)))
    first, second = metrics_lines(tmp_path)
    assert (first["flops_utilization"], first["peak_memory"]) == (0.41234, 12_345_678_901)
    assert "flops_per_step" not in first
    assert "flops_utilization" not in second and second["peak_memory"] == 7
    assert np.float32(second["loss"]) == loss and second["loss_scale"] == 32768
    assert "learning_rate" not in second
    assert result(tmp_path) == {"status": "done", "step": 2, "devices": 4, "processes": 2, "val": None, **usage}


def test_the_result_has_the_end_and_the_last_evaluation_also_of_a_resumed_run(tmp_path: Path) -> None:
    drive(JsonLines(tmp_path))
    end = {"status": "done", "step": 10, "devices": 4, "processes": 2}
    assert result(tmp_path) == end | {"val": {"loss": math.e / 10, "top1": 10 / 17, "count": 77}}
    drive(JsonLines(tmp_path), evaluate=())
    assert result(tmp_path) == end | {"val": None}
    (first := JsonLines(tmp_path)).start(run_start(0))
    first.evaluation(evaluation_record(4, metrics={"loss": math.nan, "top1": 0.5}))
    drive(JsonLines(tmp_path), start=5, evaluate=())
    assert result(tmp_path)["val"] == {"loss": None, "top1": 0.5, "count": 77}


def test_a_validation_that_a_resumed_run_repeats_has_one_line(tmp_path: Path) -> None:
    drive(JsonLines(tmp_path), stop=4)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    resumed = JsonLines(tmp_path)
    resumed.start(run_start(4))
    resumed.evaluation(evaluation_record(4, 77))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    resumed.evaluation(evaluation_record(4, 77, split="test"))
    assert [line["split"] for line in metrics_lines(tmp_path)[-2:]] == ["val", "test"]


def test_a_run_that_trains_no_more_steps_keeps_its_result(tmp_path: Path) -> None:
    drive(JsonLines(tmp_path))
    before = (tmp_path / "result.json").read_bytes()
    (resumed := JsonLines(tmp_path)).start(run_start(TOTAL, devices=7))
    assert not (tmp_path / "result.json").exists()
    resumed.end(RunEnd("done", TOTAL, 0.1, {}))
    assert (tmp_path / "result.json").read_bytes() == before
    # A run that failed after its last checkpoint may end there with a shorter duration.
    for steps, previous in (((TOTAL,), before), ((), b'{"status": "failed", "step": 12}'), ((), b"{")):
        (tmp_path / "result.json").write_bytes(previous)
        resumed.start(run_start(TOTAL, devices=7))
        for step in steps:
            resumed.step(step_record(step))
        resumed.end(RunEnd("done", TOTAL, 0.1, {}))
        assert (result(tmp_path)["status"], result(tmp_path)["devices"]) == ("done", 7)


@settings(max_examples=40)
@example(killed=5, repeated=1, incomplete=b'{"step": 6, "lo')
@example(killed=5, repeated=0, incomplete=b"\0\r\0")
@given(
    killed=st.integers(1, TOTAL - 1),
    repeated=st.integers(0, 3),
    incomplete=st.binary(max_size=9).filter(lambda tail: b"\n" not in tail),
)
def test_a_killed_and_resumed_run_writes_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, killed: int, repeated: int, incomplete: bytes
) -> None:
    whole, resumed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("resumed")
    drive(JsonLines(whole))
    drive(JsonLines(resumed), stop=killed)
    with (resumed / "metrics.jsonl").open("ab") as file:
        file.write(incomplete)
    drive(JsonLines(resumed), start=max(1, killed - repeated))
    for name in ("metrics.jsonl", "result.json"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()


def test_resuming_does_not_rewrite_a_file_that_needs_no_cut(tmp_path: Path) -> None:
    spaced = b'{ "step":3 ,"split" : "train"}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(spaced)
    before = path.stat()
    JsonLines(tmp_path).start(run_start(3))
    assert path.read_bytes() == spaced
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    JsonLines(tmp_path).start(run_start(2))
    assert path.read_bytes() == b""
    (tmp_path / "result.json").write_text("{}")
    JsonLines(tmp_path).start(run_start())
    assert path.read_bytes() == b"" and not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("line", [b"hello\n", b'{"step": "1", "split": "val"}\n'])
def test_an_error_names_a_foreign_line_and_nothing_is_lost(tmp_path: Path, line: bytes) -> None:
    content = b'{"step": 1, "split": "train"}\n' + line + b'{"step": 3, "split": "train"}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(f"{path}:2: not a JSON object with a step and a split")):
        JsonLines(tmp_path).start(run_start(1))
    assert path.read_bytes() == content


def test_a_failed_replacement_leaves_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    files.replace(path, b"old")

    def full(handle: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=re.escape(f"{path}: cannot be written (No space left on device)")):
        files.replace(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    assert path.read_bytes() == b"old"


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
    assert progress.count_parameters(shapes) == 4608 + 640
