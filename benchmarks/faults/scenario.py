"""Runs one scenario of `benchmarks/chaos.py`: injects a fault, waits for the end, and compares the results."""

import contextlib
import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.harness import Figures
from benchmarks.faults.hosts import Cable, Store, small_disk
from benchmarks.faults.jobs import Job, TookTooLong, is_done, logged_step, train_command
from benchmarks.faults.moments import LONGEST, MOMENTS, is_of_a_restart
from benchmarks.faults.outcomes import Outcome, difference, outcome
from benchmarks.faults.promises import FAULTS, SLACK, Fault
from benchmarks.faults.strikes import Target, kill_process

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
    def rng(self) -> random.Random:
        """A random generator that depends on seed and number only."""
        return random.Random(f"{self.seed} {self.number}")

    def __str__(self) -> str:
        return f"{self.number:>3}  {self.fault}, {self.moment}, {self.place}"


def draw(seed: int, count: int, faults: Mapping[str, Fault]) -> list[Scenario]:
    """Draw scenarios: all faults in turn, with order, moments and topologies that depend on the seed."""
    rng, scenarios = random.Random(seed), list[Scenario]()
    while len(scenarios) < count:
        for name in rng.sample(list(faults), len(faults)):
            moment, place = rng.choice(faults[name].moments), rng.choice(faults[name].places)
            scenarios.append(Scenario(len(scenarios), seed, name, moment, place))
    return scenarios[:count]


class Stage:
    """The jobs of one scenario, which are started one after the other in the same work directory.

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
        words = train_command(self.data, self.workdir)
        folder = self.folder / f"start-{len(self.jobs)}"
        options = [*more]
        hosts, processes = [""], 2
        if self.cable is not None:
            hosts, processes = self.cable.hosts, 1
            options += ["--coordinator", f"{self.cable.addresses[0]}:{COORDINATOR_PORT}"]
        self.jobs.append(Job(hosts, folder, words, options, processes, self.cache))
        return self.jobs[-1]

    def until_done(self) -> None:
        """Start the run again, as a user would, if it is not done. Raises TookTooLong or RuntimeError."""
        # A finished work directory may have been removed.
        if self.jobs and not any(self.jobs[-1].codes) and self.workdir.exists():
            return
        job = self.start()
        job.wait_for_end(2 * LONGEST)
        if any(job.codes) or not is_done(self.workdir):
            raise RuntimeError(f"the restarted run ended with exit codes {job.codes}: {job.folder}")

    def target(self, job: Job, rng: random.Random) -> Target:
        return Target(job, rng, self.workdir, self.cable, self.store, self.disk)


@contextlib.contextmanager
def open_stage(
    place: str, folder: Path, data: Mapping[str, Path], cache: Path, *, small: bool = False
) -> Iterator[Stage]:
    """Yield a stage. Afterwards, end its jobs, cable, store and disk. The files remain."""
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


def run_undisturbed(place: str, folder: Path, data: Mapping[str, Path], cache: Path) -> Outcome:
    """Return the outcome of a run without a fault."""
    with open_stage(place, folder, data, cache) as stage:
        stage.until_done()
        return outcome(stage.workdir)


def run_scenario(scenario: Scenario, folder: Path, data: Mapping[str, Path], cache: Path, expected: Outcome) -> Figures:
    """Run a scenario. Returns the seconds to the end of all processes, and a description of a broken promise."""
    fault, rng = FAULTS[scenario.fault], scenario.rng
    if scenario.moment == "compile":
        # With the shared cache nothing would be compiled.
        cache = folder / "programs"
    results: Figures = {"fault": scenario.fault, "moment": scenario.moment, "place": scenario.place, "broken": ""}
    with open_stage(scenario.place, folder, data, cache, small=scenario.fault == "disk full") as stage:
        try:
            if is_of_a_restart(scenario.moment):
                kill_once(stage, rng)
            results |= strike(stage, fault, scenario.moment, rng)
            stage.until_done()
            results["differs"] = difference(outcome(stage.workdir), expected)
        except (TookTooLong, RuntimeError, OSError, ValueError) as error:
            results["broken"] = results["broken"] or f"{type(error).__name__}: {error}"
    return results


def kill_once(stage: Stage, rng: random.Random) -> None:
    """Kill the run after a checkpoint, so that the next start resumes."""
    job = stage.start()
    if MOMENTS["step"](job, stage.workdir, rng):
        with kill_process(stage.target(job, rng)):
            job.wait_for_end(SLACK + LONGEST)


def strike(stage: Stage, fault: Fault, moment: str, rng: random.Random) -> Figures:
    """Start the run, wait for the moment, inject the fault, and wait for the end."""
    job = stage.start(*fault.options)
    is_reached = MOMENTS[moment](job, stage.workdir, rng)
    results: Figures = {"came": is_reached, "step": logged_step(stage.workdir), "broken": ""}
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if is_reached:
            try:
                stack.enter_context(fault.strike(stage.target(job, rng)))
            except ProcessLookupError as error:
                # The process has not started yet, or has ended.
                results["came"], results["missed"] = False, str(error)
        limit = fault.promise.seconds if results["came"] and not fault.passes else 2 * LONGEST
        named = job.wait_for_end(limit, fault.promise.words)
    results |= {"named": named, "seconds": time.monotonic() - began, "codes": job.codes}
    results["broken"] = fault.promise.broken_by(job.codes, job.output) if results["came"] else ""
    return results


def is_root() -> bool:
    return os.geteuid() == 0
