"""The moments of a run at which `benchmarks/chaos.py` injects faults.

Each function takes the job, its work directory and a random generator, and waits for its moment by reading the run's
files. It returns False if the job was over first.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.jobs import EVERY, STEPS, Job, being_saved, step_of

Moment = Callable[[Job, Path, random.Random], bool]

LONGEST = 90.0
"""Maximum seconds from the start to the first step on a busy machine."""
START_SECONDS = 3.0
"""Approximate seconds from the command until a process joins the job."""


def start(job: Job, workdir: Path, chance: random.Random) -> bool:
    """During the start: imports, joining the job, and the comparison of settings."""
    time.sleep(chance.uniform(0, START_SECONDS))
    return not job.is_over


def compilation(job: Job, workdir: Path, chance: random.Random) -> bool:
    """Between the line that describes the run and the first step."""
    came = job.wait_until(lambda: "writing to" in job.output, LONGEST)
    time.sleep(chance.uniform(0, 1))
    return came


def step(job: Job, workdir: Path, chance: random.Random) -> bool:
    begun = step_of(workdir)
    wanted = chance.randint(min(begun + 1, STEPS - 1), STEPS - 1)
    came = job.wait_until(lambda: step_of(workdir) >= wanted, LONGEST)
    time.sleep(chance.uniform(0, 0.02))
    return came


def save(job: Job, workdir: Path, chance: random.Random) -> bool:
    """While a checkpoint and its manifest are being written."""
    wanted = EVERY * chance.randint(1, STEPS // EVERY)
    came = job.wait_until(lambda: max(being_saved(workdir), default=0) >= wanted or step_of(workdir) > wanted, LONGEST)
    time.sleep(chance.uniform(0, 0.15))
    return came


def evaluation(job: Job, workdir: Path, chance: random.Random) -> bool:
    """After the last step before a validation, which takes some tenths of a second."""
    wanted = EVERY * chance.randint(1, STEPS // EVERY)
    came = job.wait_until(lambda: step_of(workdir) >= wanted, LONGEST)
    time.sleep(chance.uniform(0, 0.5))
    return came


def end(job: Job, workdir: Path, chance: random.Random) -> bool:
    """Between the last step and the end of the processes."""
    came = job.wait_until(lambda: step_of(workdir) >= STEPS, LONGEST)
    time.sleep(chance.uniform(0, 1.5))
    return came


MOMENTS: dict[str, Moment] = {
    "start": start,
    "compile": compilation,
    "step": step,
    "save": save,
    "evaluation": evaluation,
    "end": end,
    # The run has checkpoints, was killed once, and is started again.
    "restart": start,
    "restart, step": step,
}


def is_of_a_restart(moment: str) -> bool:
    return moment.startswith("restart")
