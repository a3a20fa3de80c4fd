"""Processes that are alive and stand still: the job ends, names the one that others wait for, and shows its stacks."""

import os
import re

import pytest
from started import ENDLESS, TRAIN, Launched, Program, environment, last_line, lines

SOON = 60
"""Seconds within which all must have ended: three times the longest limit here, on a machine that is busy."""
STALL = ["--parallel.stall-timeout", "3"]

SCRIPT = """
import itertools, os, re, sys, threading
import jax, numpy as np
from jax.experimental import multihost_utils
from jaxddp.cli import main
from jaxddp.mesh import Topology
from jaxddp.training.checkpoints import Checkpoints
from jaxddp.training.evaluation import Evaluator
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
    "save": (Checkpoints, "wait", 0),
    "validation": (Evaluator, "step", 0),
    "start": (Checkpoints, "__enter__", 0),
}
who, where, how = sys.argv[1], sys.argv[3], sys.argv[4]
if os.environ.get("JAX_PROCESS_ID", "0") == who:
    before(*PLACES[where], globals()[how])
sys.exit(main(sys.argv[5:]))
"""


@pytest.fixture
def stalled(arrays, start, tmp_path):
    """Starts a training in which a process is to stand still, and returns its words and its launch."""

    def run(who: int, where: str, how: str, *more: str, processes: int = 2) -> Program:
        script, workdir = tmp_path / "script.py", tmp_path / "run"
        script.write_text(SCRIPT)
        words = [*TRAIN, "--data.path", str(arrays), "--workdir", str(workdir), *ENDLESS, *STALL, *more]
        command = ["python", str(script), str(who), str(tmp_path / "fifo"), where, how, *words]
        return start(Launched, tmp_path / "launch", processes, command, "--grace", "2")

    return run


def ends_by_naming(run: Program, processes: int, process: int, phase: str, function: str) -> None:
    assert run.end(SOON) == 1, run.out + run.err
    line = rf"jaxddp: process {process} made no progress for \d+ s( after step \d+)?, in phase '{phase}' \(on .*\); "
    for rank in range(processes):
        assert re.match(line, run.last_of(rank)), run.last_of(rank)
    log = (run.logs / f"process-{process}.log").read_text()
    assert "the stacks of all threads:\n" in log and f", line " in log and f" in {function}\n" in log


@pytest.mark.parametrize(
    ("who", "where", "how"),
    [(1, "input", "in_a_file"), (0, "listeners", "for_ever"), (1, "input", "in_a_loop")],
)
def test_a_process_that_stands_still_is_named_by_all(stalled, who, where, how):
    run = stalled(who, where, how)
    ends_by_naming(run, 2, who, where, how)
    other = (run.logs / f"process-{1 - who}.log").read_text()
    assert "the stacks" not in other.partition("jaxddp: process")[0]


def test_a_collective_that_others_do_not_enter(stalled):
    run = stalled(1, "input", "in_a_collective")
    assert run.end(SOON) == 1, run.out + run.err
