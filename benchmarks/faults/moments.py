"""The moments of a run at which `benchmarks/chaos.py` injects faults.

Each function takes the job, its work directory and a random generator, and waits for its moment by reading the run's
files. It returns False if the job ended first.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.jobs import EVERY, STEPS, Job, logged_step, unfinished_checkpoints

Moment = Callable[[Job, Path, random.Random], bool]

LONGEST = 90.0
"""Maximum seconds from the start to the first step on a busy machine."""
START_SECONDS = 3.0
"""Approximate seconds from the command until a process joins the job."""


def start(job: Job, workdir: Path, rng: random.Random) -> bool:
    """During the start: imports, joining the job, and the comparison of settings."""
    time.sleep(rng.uniform(0, START_SECONDS))
    return not job.is_over


def compilation(job: Job, workdir: Path, rng: random.Random) -> bool:
    """Between the line that describes the run and the first step."""
    is_reached = job.wait_until(lambda: "writing to" in job.output, LONGEST)
    time.sleep(rng.uniform(0, 1))
    return is_reached


def step(job: Job, workdir: Path, rng: random.Random) -> bool:
    current = logged_step(workdir)
    target = rng.randint(min(current + 1, STEPS - 1), STEPS - 1)
    is_reached = job.wait_until(lambda: logged_step(workdir) >= target, LONGEST)
    time.sleep(rng.uniform(0, 0.02))
    return is_reached


def save(job: Job, workdir: Path, rng: random.Random) -> bool:
    """While a checkpoint and its manifest are being written."""
    target = EVERY * rng.randint(1, STEPS // EVERY)
    is_reached = job.wait_until(
        lambda: max(unfinished_checkpoints(workdir), default=0) >= target or logged_step(workdir) > target, LONGEST
    )
    time.sleep(rng.uniform(0, 0.15))
    return is_reached


def evaluation(job: Job, workdir: Path, rng: random.Random) -> bool:
    """After the last step before a validation, which takes some tenths of a second."""
    target = EVERY * rng.randint(1, STEPS // EVERY)
    is_reached = job.wait_until(lambda: logged_step(workdir) >= target, LONGEST)
    time.sleep(rng.uniform(0, 0.5))
    return is_reached


def end(job: Job, workdir: Path, rng: random.Random) -> bool:
    """Between the last step and the end of the processes."""
    is_reached = job.wait_until(lambda: logged_step(workdir) >= STEPS, LONGEST)
    time.sleep(rng.uniform(0, 1.5))
    return is_reached


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
