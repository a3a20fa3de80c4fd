"""The progress of a process, and the search for the stuck process: the process that the others wait for."""

import os
import subprocess
import sys
import threading
import time
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxddp.core.phases as phases
from jaxddp.core.phases import COMMIT, OUTSIDE, Phase, Progress, stuck
from jaxddp.job.watchdog import Timeouts

PHASES = (*typing.get_args(Phase), COMMIT)
WAITING = {"agreement", "dispatch", "device", COMMIT}
progress_by_process = st.dictionaries(
    st.integers(0, 7), st.builds(Progress, st.sampled_from(PHASES), st.integers(0, 3), st.floats(0, 100)), min_size=1
)


def test_nested_phases_count_their_seconds_separately():
    before = phases.spent()
    with phases.phase("validation"):
        time.sleep(0.02)
        with phases.phase("device"):
            assert phases.progress().phase == "device"
            time.sleep(0.05)
        assert phases.progress().phase == "validation"
    spent = {name: phases.spent()[name] - before.get(name, 0) for name in ("validation", "device")}
    assert spent["validation"] >= 0.02
    assert spent["device"] >= 0.05
    with pytest.raises(RuntimeError), phases.phase("input"):
        raise RuntimeError
    assert phases.progress().phase == OUTSIDE


def test_a_step_a_move_or_subtracted_idle_time_is_progress():
    for advance in (lambda: phases.at_step(7), phases.moved, lambda: phases.subtract_idle(100.0)):
        phases._tracker.changed = time.monotonic() - 50
        assert phases.progress().idle >= 50
        advance()
        assert phases.progress().idle < 50
    assert phases.progress().step == 7
    phases.at_step(0)


@given(progress_by_process, st.floats(0.1, 50))
def test_the_stuck_process_is_found(processes, timeout):
    stuck_process = stuck(processes, timeout)
    busy = {process for process, progress in processes.items() if progress.phase not in {*WAITING, OUTSIDE}}
    waiting = {process for process, progress in processes.items() if progress.phase in WAITING}
    outside = processes.keys() - busy - waiting
    if stuck_process is not None:
        assert processes[stuck_process].idle > timeout, "too early"
        assert stuck_process not in waiting or not (busy | outside), "it waits for another process"
        assert stuck_process not in outside or waiting, "no process waits for it"
    longest = 6 * timeout
    late = {process for process, progress in processes.items() if progress.idle > longest}
    candidates = busy | (outside if waiting else set()) or waiting
    assert (stuck_process is not None) or not (late & candidates), "the job waits forever"


def test_if_all_processes_wait_the_one_with_the_fewest_steps_is_stuck():
    processes = {0: Progress("device", 9, 20.0), 1: Progress("dispatch", 8, 15.0), 2: Progress("device", 8, 16.0)}
    assert stuck(processes, 10) == 2
    assert stuck({**processes, 3: Progress("save", 9, 20.0)}, 10) is None
    assert stuck({**processes, 3: Progress("save", 9, 31.0)}, 10) == 3
    # In a save, it is the process that has not written its part.
    processes = {0: Progress(COMMIT, 9, 40.0), 1: Progress("save", 9, 31.0), 2: Progress(COMMIT, 9, 41.0)}
    assert stuck(processes, 10) == 1
    assert stuck({**processes, 1: Progress("save", 9, 30.0)}, 10) is None


def test_a_save_is_in_phase_commit_while_one_of_its_threads_waits():
    waiting, release = threading.Event(), threading.Event()

    def wait() -> None:
        with phases.committing():
            waiting.set()
            release.wait(20)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(20) and phases.progress().phase == OUTSIDE
    with phases.phase("save"):
        assert phases.progress().phase == COMMIT
        with phases.phase("device"):
            assert phases.progress().phase == "device"
        release.set()
        thread.join()
        assert phases.progress().phase == "save"


@given(st.floats(0.1, 1e5), st.floats(0.1, 1e5))
def test_a_process_waits_longer_than_any_phase_may_take(stall, silence):
    timeouts = Timeouts(silence=silence, stall=stall)
    assert all(timeouts.longest > Progress(phase, 0, 0.0).limit(stall) + silence for phase in PHASES)


ALONE = """
import sys, threading
import jaxddp.core.phases as phases
from jaxddp.core.process_exit import watch_alone

watch_alone(0.5)
{body}
"""
BODIES = {
    "a wait": "with phases.phase('input'): threading.Event().wait()",
    "a pipe that nobody reads": ("with phases.phase('listeners'):\n    while True: print('x' * 1000); phases.moved()"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_single_process_that_is_stuck_ends_with_its_stacks(kind, tmp_path):
    (tmp_path / "script.py").write_text(ALONE.format(body=BODIES[kind]))
    environ, pipe = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}, subprocess.PIPE
    command = [sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.wait(40) == 1
            assert process.stderr is not None
            *stacks, last = process.stderr.read().splitlines()
        finally:
            process.kill()
    phase = "listeners" if "pipe" in kind else "input"
    assert last.startswith("jaxddp: this process made no progress for ") and f", in phase '{phase}'; " in last
    assert stacks[0] == "the stacks of all threads:"
    assert any(f'"{tmp_path}/script.py", line ' in line for line in stacks)


def test_of_two_threads_the_first_determines_the_phase():
    """Two runs in one notebook must not stay in a phase after both are done."""
    inside, done = threading.Barrier(2), threading.Event()

    def run() -> None:
        with phases.phase("validation"):
            inside.wait(10)
            done.wait(10)
            phases.at_step(7)

    with phases.phase("training"):
        thread = threading.Thread(target=run)
        thread.start()
        inside.wait(10)
        assert phases.progress().phase == "training"
    assert phases.progress().phase == OUTSIDE
    with phases.phase("save"):
        done.set()
        thread.join(20)
        assert phases.progress()[:2] == ("save", 0)
    assert phases.progress().phase == OUTSIDE
