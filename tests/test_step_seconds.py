"""Seconds per step by process and phase: the slow process, its warning, and the file for `jaxddp doctor`."""

import logging
from pathlib import Path

import pytest

import jaxddp.training.listeners.jsonl as slow_processes
from jaxddp.cluster.doctor import slow_processes as check
from jaxddp.core.errors import InputError
from jaxddp.core.peers import Peers, Spent
from jaxddp.training.events import RunStart, StepRecord
from jaxddp.training.listeners.jsonl import FILE, SlowProcesses, StepSeconds, encode

FAST = {"input": 0.01, "dispatch": 0.001, "device": 0.08, "save": 0.0, "training": 0.001, "listeners": 0.001}


def spent_until(*seconds_by_phase: dict[str, float], step: int = 100) -> dict[int, tuple[int, dict[str, float]]]:
    """Return the time that each process has spent up to a step, given its seconds per step and phase."""
    return {
        process: (step, {phase: seconds * step for phase, seconds in phases.items()} | {"compile": 70.0})
        for process, phases in enumerate(seconds_by_phase)
    }


def step_seconds(*seconds_by_phase: dict[str, float]) -> StepSeconds:
    result = StepSeconds.between(spent_until(*seconds_by_phase, step=20), spent_until(*seconds_by_phase, step=100))
    assert result is not None
    return result


def test_seconds_per_step_are_the_time_between_two_readings():
    result = step_seconds(FAST, FAST)
    assert (result.first, result.last) == (20, 100)
    expected = {"input": 0.01, "dispatch": 0.001, "device": 0.08, "save": 0.0, "other": 0.002}
    assert dict(result.seconds[1]) == pytest.approx(expected)
    assert result.slow() == []


def test_only_the_process_that_makes_the_others_wait_is_named():
    slow = {**FAST, "input": 0.07, "device": 0.02}
    (first,) = step_seconds(FAST, slow, FAST, FAST).slow()
    assert str(first) == "process 1 takes 0.07 s a step in phase 'input', 7.0 times the median"
    # Without another slow phase, the device time shows the slow process.
    (first,) = step_seconds(FAST, FAST, {**FAST, "device": 0.2}).slow()
    assert (first.process, first.phase) == (2, "device")
    (first,) = step_seconds(FAST, {**FAST, "save": 0.05}).slow()
    assert str(first) == "process 1 takes 0.05 s a step in phase 'save', and the median is 0"
    # The median of two processes is the smaller value.
    assert [(finding.process, finding.phase) for finding in step_seconds(slow, FAST).slow()] == [(0, "input")]


def test_small_differences_and_processes_without_a_step_are_not_reported():
    # Below a half of the median, or below a tenth of a step.
    for changed in ({"input": 0.0149}, {"dispatch": 0.009}):
        assert step_seconds(FAST, {**FAST, **changed}).slow() == []
    assert StepSeconds.between(spent_until(FAST, FAST), spent_until(FAST, FAST)) is None
    assert StepSeconds.between({}, spent_until(FAST)) is None


def test_the_table_of_many_processes_has_the_slowest_and_the_median():
    lines = step_seconds(*[FAST] * 20, {**FAST, "input": 0.5}).table()
    assert len(lines) == 1 + 8 + 1
    assert lines[0].split() == ["input", "dispatch", "device", "save", "other"]
    assert [line.split()[:2] for line in lines[1:]] == [
        *(["process", str(p)] for p in (*range(7), 20)),
        ["median", "0.0100"],
    ]
    assert lines[-2].split() == ["process", "20", "0.5000", "0.0010", "0.0800", "0.0000", "0.0020"]


def record(step: int) -> StepRecord:
    return StepRecord(step, 0.0, {}, None, 1.0, 0.0)


def test_a_slow_process_is_logged_once_with_a_table_which_the_doctor_reads(tmp_path, monkeypatch, caplog):
    seconds_by_process = {0: FAST, 1: {**FAST, "input": 0.07}}
    step = 0

    class FixedPeers(Peers):
        def spent(self) -> dict[int, Spent]:
            return {
                process: (step, {phase: s * step for phase, s in seconds.items()})
                for process, seconds in seconds_by_process.items()
            }

    monkeypatch.setattr(slow_processes, "COMPARISON_SECONDS", 0.0)
    listener = SlowProcesses(FixedPeers())
    listener.start(RunStart(0, 100, 8, 39, 2, 2, workdir=tmp_path))
    for step in (10, 20, 30):
        listener.step(record(step))
    (tmp_path / "equal").mkdir()
    (tmp_path / "equal" / FILE).write_bytes(encode(vars(step_seconds(FAST, FAST))))
    detail = "2 processes, none makes the others wait (steps 21 to 100 of the run there)"
    assert (check(tmp_path / "equal").verdict, check(tmp_path / "equal").detail) == ("ok", detail)
    (message,) = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    line, *table = message.split("\n")
    assert line == (
        "process 1 takes 0.07 s a step in phase 'input', 7.0 times the median; seconds a step, from step 11 to 20:"
    )
    assert len(table) == 4
    finding = check(tmp_path)
    assert finding.verdict == "warn"
    assert finding.detail.startswith(
        "process 1 takes 0.07 s a step in phase 'input', 7.0 times the median (steps 21 to 30"
    )


@pytest.mark.parametrize("seconds", ["", '"0": {"input": "x"}'])
def test_a_damaged_file_raises_a_one_line_error(tmp_path: Path, seconds):
    (tmp_path / FILE).write_text(f'{{"first": 1, "last": 2, "seconds": {{{seconds}}}}}')
    with pytest.raises(InputError, match=f"{FILE}: cannot be read .*; remove it"):
        check(tmp_path)
