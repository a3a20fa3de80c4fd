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
from jaxddp.data.order import EvalOrder
from jaxddp.mesh import Topology
from jaxddp.engine.step import Program
from jaxddp.training.checkpoints.manager import Barrier
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.listeners.jsonl import JsonLines

def in_a_file():
    os.mkfifo(sys.argv[2])
    open(sys.argv[2]).read()

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
    "listeners": (JsonLines, "step", 6),
    "save": (Checkpoints, "_finish_manifest", 0),
    "its part of a save": (Barrier, "__call__", 0),
    "validation": (EvalOrder, "rows", 1),
    "dispatch": (Program, "__call__", 8),
}
who, where, how = sys.argv[1], sys.argv[3], sys.argv[4]
if os.environ.get("JAX_PROCESS_ID", "0") == who:
    before(*PLACES[where], globals()[how])
sys.exit(main(sys.argv[5:]))
"""


@pytest.fixture
def stalled(arrays, start, tmp_path):
    """Start a training in which a process stalls, and return its command and its launch."""

    def run(rank: int, phase: str, stall: str, *more: str, processes: int = 2) -> Program:
        script, workdir = tmp_path / "script.py", tmp_path / "run"
        script.write_text(SCRIPT)
        words = [*TRAIN, "--data.path", str(arrays), "--workdir", str(workdir), *ENDLESS, *STALL_OPTIONS, *more]
        command = ["python", str(script), str(rank), str(tmp_path / "fifo"), phase, stall, *words]
        return start(Launched, tmp_path / "launch", processes, command, "--grace", "2")

    return run


def assert_all_name(run: Program, processes: int, process: int, phase: str, function: str) -> None:
    assert run.end(SOON) == 1, run.out + run.err
    line = rf"jaxddp: process {process} made no progress for \d+ s( after step \d+)?, in phase '{phase}' \(on .*\); "
    for rank in range(processes):
        assert re.match(line, run.last_of(rank)), run.last_of(rank)
    log = (run.logs / f"process-{process}.log").read_text()
    assert "the stacks of all threads:\n" in log and ", line " in log and f" in {function}\n" in log


# tests/test_progress.py tests which process and phase is named, and other stalls.
@pytest.mark.parametrize(
    ("rank", "phase", "stall"),
    [pytest.param(0, "listeners", "for_ever", marks=pytest.mark.ci), (1, "input", "in_a_loop")],
)
def test_all_processes_name_a_stalled_process(stalled, rank, phase, stall):
    run = stalled(rank, phase, stall)
    assert_all_name(run, 2, rank, phase, stall)
    other = (run.logs / f"process-{1 - rank}.log").read_text()
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


# tests/test_progress.py tests the watch itself.
@pytest.mark.ci
@pytest.mark.parametrize(
    ("phase", "stall"), [("save", "in_a_file"), pytest.param("validation", "in_a_loop", marks=pytest.mark.exhaustive)]
)
def test_a_stall_of_a_single_process_ends_it(stalled, phase, stall):
    options = ["--parallel.stall-timeout", "2", "--train.duration", "4 steps", "--eval.every", "2 steps"]
    run = stalled(0, phase, stall, *options, processes=1)
    assert run.end(SOON) == 1, run.out + run.err
    last = run.last_of(0)
    assert re.match(rf"jaxddp: this process made no progress for \d+ s after step \d, in phase '{phase}'; ", last), last
    assert f" in {stall}\n" in (run.logs / "process-0.log").read_text()
