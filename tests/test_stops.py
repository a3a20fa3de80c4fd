"""A run that is stopped or killed at any step, and resumed, logs the same as an uninterrupted run."""

import functools
import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.data import random_table
from support.networks import linear_model
from support.runs import Records, setup_of, train
from support.shared import sgd

from jaxddp.core.errors import Preempted
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.listeners.jsonl import JsonLines

TABLE, VAL = random_table(50), random_table(9, seed=1)
STEPS = 16
TIMES = ("seconds", "images_per_second", "data_wait_fraction", "epoch_seconds", "peak_memory", "flops_utilization")


class Killed(BaseException):
    """An exception that ends a run as if the process had been killed."""


class KilledAt:
    def __init__(self, step: int):
        self._step = step

    def step(self, record):
        if record.step >= self._step:
            raise Killed


def lines(workdir: Path) -> list[dict]:
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def run(workdir: Path, log: str, save: str, *, stop: int = 0, kill: int = 0) -> Records:
    """Train 16 steps, with epochs of 6.25 steps, in a work directory until it is stopped, killed or done."""
    records = Records()
    plan = {"train": {"duration": f"{STEPS} steps"}, "log": {"every": log}, "checkpoint": {"every": save}}
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        listeners = [JsonLines(workdir), records, *([KilledAt(kill)] if kill else [])]
        options = {"checkpoints": checkpoints, "resume_step": checkpoints.latest()}
        train(
            *(setup_of(linear_model(), sgd(0.05), TABLE), plan | {"eval": {"every": "0.5 epochs", "batch_size": 8}}),
            val=VAL,
            listeners=listeners,
            should_stop=lambda step: step == stop,
            **options,
        )
    return records


@functools.cache
def uninterrupted(log: str, save: str) -> tuple[list[dict], list[int]]:
    workdir = Path(tempfile.mkdtemp())
    steps = [record.step for record in run(workdir, log, save).steps]
    rows = lines(workdir)
    shutil.rmtree(workdir)
    return rows, steps


@pytest.mark.ci
@settings(max_examples=settings.default.max_examples // 10)
@example("3 steps", "5 steps", [(False, 4), (True, 8), (False, 11)])
@given(
    st.sampled_from(("3 steps", "0.4 epochs", "0 steps")),
    st.sampled_from(("5 steps", "0 steps")),
    st.lists(st.tuples(st.booleans(), st.integers(1, STEPS)), min_size=1, max_size=2, unique_by=lambda end: end[1]),
)
def test_a_run_stopped_or_killed_at_any_steps_logs_the_lines_of_an_uninterrupted_one(log, save, ends):
    expected, steps = uninterrupted(log, save)
    workdir, logged_steps = Path(tempfile.mkdtemp()), []
    try:
        for killed, step in sorted(ends, key=lambda end: end[1]):
            with suppress(Killed, Preempted):
                run(workdir, log, save, **({"kill": step} if killed else {"stop": step}))
        logged_steps = [record.step for record in run(workdir, log, save).steps]
        assert lines(workdir) == expected
        # Each logged step is also a step of the uninterrupted run.
        assert {*logged_steps} <= {*steps}
    finally:
        shutil.rmtree(workdir)
