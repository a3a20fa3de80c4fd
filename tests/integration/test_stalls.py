"""Stalled processes: the job ends, names the process that others wait for, and logs its stacks."""

import re

import pytest
from support.processes import ENDLESS, TRAIN, Launched, Program

SOON = 60
"""Maximum seconds until all processes end on a busy machine: three times the longest limit of these tests."""
STALL_OPTIONS = ["--parallel.stall-timeout", "3"]

SCRIPT = """
import itertools, os, re, sys, threading
import jax, numpy as np
from jax.experimental import multihost_utils
from jaxddp.cli import main
from jaxddp.mesh import Topology
from jaxddp.engine.programs import Program
from jaxddp.training.checkpoints.manager import Barrier

def for_ever():
    threading.Event().wait()

def in_a_loop():
    while True:
        pass

def in_a_collective():
    multihost_utils.process_allgather(np.zeros(1))

def with_pythons_lock():
    re.match("(a*)*b", "a" * 60)

def before(owner, name, number, stall):
    whole, calls = getattr(owner, name), itertools.count()
    def stalling(*arguments, **options):
        if next(calls) == number:
            stall()
        return whole(*arguments, **options)
    setattr(owner, name, stalling)

PLACES = {
    "input": (Topology, "place", 12),
    "its part of a save": (Barrier, "__call__", 0),
    "dispatch": (Program, "__call__", 8),
}
who, where, how = sys.argv[1:4]
if os.environ.get("JAX_PROCESS_ID", "0") == who:
    before(*PLACES[where], globals()[how])
sys.exit(main(sys.argv[4:]))
"""


@pytest.fixture
def stalled(arrays, start, tmp_path):
    """Start a training in which a process stalls, and return its command and its launch."""

    def run(rank: int, phase: str, stall: str, *more: str) -> Program:
        script, workdir = tmp_path / "script.py", tmp_path / "run"
        script.write_text(SCRIPT)
        words = [*TRAIN, "--data.path", str(arrays), "--workdir", str(workdir), *ENDLESS, *STALL_OPTIONS, *more]
        command = ["python", str(script), str(rank), phase, stall, *words]
        return start(Launched, tmp_path / "launch", 2, command, "--grace", "2")

    return run


def assert_all_name(run: Program, processes: int, process: int, phase: str, function: str) -> None:
    assert run.end(SOON) == 1, run.out + run.err
    line = rf"jaxddp: process {process} made no progress for \d+ s( after step \d+)?, in phase '{phase}' \(on .*\); "
    for rank in range(processes):
        assert re.match(line, run.last_of(rank)), run.last_of(rank)
    log = (run.logs / f"process-{process}.log").read_text()
    assert "the stacks of all threads:\n" in log and ", line " in log and f" in {function}\n" in log


# tests/test_progress.py tests which process and phase is named, and other stalls.
@pytest.mark.parametrize("stall", ["for_ever", pytest.param("in_a_loop", marks=pytest.mark.ci)])
def test_all_processes_name_a_stalled_process(stalled, stall):
    run = stalled(1, "input", stall)
    assert_all_name(run, 2, 1, "input", stall)
    other = (run.logs / "process-0.log").read_text()
    assert "the stacks" not in other.partition("jaxddp: process")[0]


@pytest.mark.ci
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_all_processes_name_the_process_that_does_not_write_its_part_of_a_save(stalled, rank):
    run = stalled(
        rank, "its part of a save", "for_ever", "--parallel.stall-timeout", "1", "--checkpoint.every", "4 steps"
    )
    assert_all_name(run, 2, rank, "save", "for_ever")
    other = (run.logs / f"process-{1 - rank}.log").read_text()
    assert "the stacks" not in other.partition("jaxddp: process")[0]


@pytest.mark.ci
def test_a_collective_that_others_do_not_enter_ends_the_job_with_the_stacks_of_both(stalled):
    """The processes wait in different collectives, so the stacks of both are logged."""
    run = stalled(1, "dispatch", "in_a_collective")
    assert run.end(SOON) == 1, run.out + run.err
    line = r"jaxddp: process [01] made no progress for \d+ s after step \d+, in phase '(dispatch|device)' .*the log of"
    for rank in (0, 1):
        assert re.match(line, run.last_of(rank)), run.last_of(rank)
        assert "the stacks of all threads:\n" in (run.logs / f"process-{rank}.log").read_text()
    assert " in in_a_collective\n" in (run.logs / "process-1.log").read_text()


@pytest.mark.ci
def test_a_process_that_holds_pythons_lock_is_reported_as_silent(stalled):
    run = stalled(1, "input", "with_pythons_lock", "--parallel.heartbeat-timeout", "3")
    assert run.end(SOON) == 1, run.out + run.err
    assert "process 1: killed by SIGKILL\n" in run.err
    assert run.last_of(0).startswith("jaxddp: process 1 gave no sign of life for 3 s")
