"""The moments of a run at which `benchmarks/chaos.py` strikes: each waits until what the run writes shows it.

A moment takes the job, its work directory and a source of chance, and returns whether it came before the job was over.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.jobs import EVERY, STEPS, Job, being_saved, step_of

Moment = Callable[[Job, Path, random.Random], bool]

LONGEST = 90.0
"""Seconds that a start may take until its first step, on a machine with other work."""
START_SECONDS = 3.0
"""About as long as a process takes from its command to the meeting with the others."""


def start(job: Job, workdir: Path, chance: random.Random) -> bool:
    """While the processes start: imports, the meeting, what they compare."""
    time.sleep(chance.uniform(0, START_SECONDS))
    return not job.is_over


def compilation(job: Job, workdir: Path, chance: random.Random) -> bool:
    """From the line that says what is trained to the first step."""
    came = job.wait_until(lambda: "writing to" in job.said, LONGEST)
    time.sleep(chance.uniform(0, 1))
    return came


def step(job: Job, workdir: Path, chance: random.Random) -> bool:
    begun = step_of(workdir)
    wanted = chance.randint(min(begun + 1, STEPS - 1), STEPS - 1)
    came = job.wait_until(lambda: step_of(workdir) >= wanted, LONGEST)
    time.sleep(chance.uniform(0, 0.02))
    return came


def save(job: Job, workdir: Path, chance: random.Random) -> bool:
    """While the files of a checkpoint are being written, until after their manifest."""
    wanted = EVERY * chance.randint(1, STEPS // EVERY)
    came = job.wait_until(lambda: max(being_saved(workdir), default=0) >= wanted or step_of(workdir) > wanted, LONGEST)
    time.sleep(chance.uniform(0, 0.15))
    return came


def evaluation(job: Job, workdir: Path, chance: random.Random) -> bool:
    """From the last step before a validation on, which takes some tenths of a second."""
    wanted = EVERY * chance.randint(1, STEPS // EVERY)
    came = job.wait_until(lambda: step_of(workdir) >= wanted, LONGEST)
    time.sleep(chance.uniform(0, 0.5))
    return came


def end(job: Job, workdir: Path, chance: random.Random) -> bool:
    """From the last step until the processes have gone."""
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
    # Of a run that has checkpoints and is started again: the name says that it is killed once before.
    "restart": start,
    "restart, step": step,
}


def is_of_a_restart(moment: str) -> bool:
    return moment.startswith("restart")
