"""Plays one scenario of `benchmarks/chaos.py`: injects a fault, waits for the end, and compares the results."""

import contextlib
import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.harness import Figures
from benchmarks.faults.hosts import Cable, Store, small_disk
from benchmarks.faults.jobs import Job, TookTooLong, is_done, step_of, train
from benchmarks.faults.moments import LONGEST, MOMENTS, is_of_a_restart
from benchmarks.faults.outcomes import Outcome, difference, outcome
from benchmarks.faults.promises import FAULTS, SLACK, Fault
from benchmarks.faults.strikes import Struck, kill_process

DISK_MEGABYTES = 4
COORDINATOR_PORT = 7077


@dataclass(frozen=True)
class Scenario:
    """A fault, a moment and a place: "two" processes on this machine, two "hosts", or two readers of a "store"."""

    number: int
    seed: int
    fault: str
    moment: str
    place: str

    @property
    def chance(self) -> random.Random:
        """A random generator that depends on seed and number only."""
        return random.Random(f"{self.seed} {self.number}")

    def __str__(self) -> str:
        return f"{self.number:>3}  {self.fault}, {self.moment}, {self.place}"


def draw(seed: int, count: int, faults: Mapping[str, Fault]) -> list[Scenario]:
    """Draws scenarios: all faults in turn, with order, moments and topologies that depend on the seed."""
    chance, drawn = random.Random(seed), list[Scenario]()
    while len(drawn) < count:
        for name in chance.sample(list(faults), len(faults)):
            moment, place = chance.choice(faults[name].moments), chance.choice(faults[name].places)
            drawn.append(Scenario(len(drawn), seed, name, moment, place))
    return drawn[:count]


class Stage:
    """Starts the jobs of one scenario, one after the other, in the same work directory.

    Args:
        data: The path of an .npz file at "arrays", and of a folder of images for a store at "tree".
    """

    def __init__(self, place: str, folder: Path, data: Mapping[str, Path], cache: Path, disk: Path | None):
        self.folder, self.cache, self.disk = folder, cache, disk
        self.cable = Cable() if place == "hosts" else None
        self.store = Store(data["tree"]) if place == "store" else None
        self.data = str(data["arrays"]) if self.store is None else self.store.url
        self.workdir = (disk or folder) / "run"
        self.jobs: list[Job] = []

    def start(self, *more: str) -> Job:
        words = train(self.data, self.workdir)
        folder = self.folder / f"start-{len(self.jobs)}"
        options = [*more]
        hosts, processes = [""], 2
        if self.cable is not None:
            hosts, processes = self.cable.hosts, 1
            options += ["--coordinator", f"{self.cable.addresses[0]}:{COORDINATOR_PORT}"]
        self.jobs.append(Job(hosts, folder, words, options, processes, self.cache))
        return self.jobs[-1]

    def until_done(self) -> None:
        """Starts the run again, as a user would, unless it is done. Raises TookTooLong or RuntimeError."""
        # A finished work directory may have been removed.
        if self.jobs and not any(self.jobs[-1].codes) and self.workdir.exists():
            return
        job = self.start()
        job.wait_for_end(2 * LONGEST)
        if any(job.codes) or not is_done(self.workdir):
            raise RuntimeError(f"the restarted run ended with exit codes {job.codes}: {job.folder}")

    def struck(self, job: Job, chance: random.Random) -> Struck:
        return Struck(job, chance, self.workdir, self.cable, self.store, self.disk)


@contextlib.contextmanager
def staged(place: str, folder: Path, data: Mapping[str, Path], cache: Path, *, small: bool = False) -> Iterator[Stage]:
    """Yields a stage, and stops all of it but the files afterwards."""
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(folder / "disk", DISK_MEGABYTES)) if small else None
        stage = Stage(place, folder, data, cache, disk)
        if stage.store is not None:
            stack.callback(stage.store.stop)
        if stage.cable is not None:
            stack.enter_context(stage.cable)
        try:
            yield stage
        finally:
            for job in stage.jobs:
                job.close()


def undisturbed(place: str, folder: Path, data: Mapping[str, Path], cache: Path) -> Outcome:
    """Returns the outcome of a run without a fault."""
    with staged(place, folder, data, cache) as stage:
        stage.until_done()
        return outcome(stage.workdir)


def play(scenario: Scenario, folder: Path, data: Mapping[str, Path], cache: Path, expected: Outcome) -> Figures:
    """Plays a scenario. Returns the seconds to the end of all processes, and which promise was broken."""
    fault, chance = FAULTS[scenario.fault], scenario.chance
    if scenario.moment == "compile":
        # With the shared cache nothing would be compiled.
        cache = folder / "programs"
    results: Figures = {"fault": scenario.fault, "moment": scenario.moment, "place": scenario.place, "broken": ""}
    with staged(scenario.place, folder, data, cache, small=scenario.fault == "disk full") as stage:
        try:
            if is_of_a_restart(scenario.moment):
                kill_once(stage, chance)
            results |= strike(stage, fault, scenario.moment, chance)
            stage.until_done()
            results["differs"] = difference(outcome(stage.workdir), expected)
        except (TookTooLong, RuntimeError, OSError, ValueError) as error:
            results["broken"] = results["broken"] or f"{type(error).__name__}: {error}"
    return results


def kill_once(stage: Stage, chance: random.Random) -> None:
    """Kills the run after a checkpoint, so that the next start resumes."""
    job = stage.start()
    if MOMENTS["step"](job, stage.workdir, chance):
        with kill_process(stage.struck(job, chance)):
            job.wait_for_end(SLACK + LONGEST)


def strike(stage: Stage, fault: Fault, moment: str, chance: random.Random) -> Figures:
    """Starts the run, waits for the moment, injects the fault, and waits for the end."""
    job = stage.start(*fault.options)
    came = MOMENTS[moment](job, stage.workdir, chance)
    results: Figures = {"came": came, "step": step_of(stage.workdir), "broken": ""}
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if came:
            try:
                stack.enter_context(fault.strike(stage.struck(job, chance)))
            except ProcessLookupError as error:
                # The process has not started yet, or is over.
                results["came"], results["missed"] = False, str(error)
        limit = fault.promise.seconds if results["came"] and not fault.passes else 2 * LONGEST
        named = job.wait_for_end(limit, fault.promise.words)
    results |= {"named": named, "seconds": time.monotonic() - began, "codes": job.codes}
    results["broken"] = fault.promise.broken_by(job.codes, job.output) if results["came"] else ""
    return results


def is_root() -> bool:
    return os.geteuid() == 0
