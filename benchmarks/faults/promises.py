"""The faults of `benchmarks/chaos.py`. Each has a promise: the job ends in time with a message, or it continues."""

import re
import signal
from dataclasses import dataclass

from benchmarks.faults.jobs import HEARTBEAT, STALL, START_TIMEOUT
from benchmarks.faults.strikes import (
    Strike,
    fill_disk,
    kill_host,
    kill_keeper,
    kill_launcher,
    kill_process,
    loose_cable,
    pause_fault,
    pull_cable,
    signal_fault,
    silence_store,
    start_host_again,
    start_launcher_again,
    stop_process,
    stop_store,
    workdir_fault,
)
from benchmarks.faults.work_directory import covered, moved, read_only, removed, replaced

GRACE = 2.0
SLACK = 15.0
"""Seconds added on a busy machine: the grace periods of launcher and processes, and their last writes."""
ALL_MOMENTS = ("start", "compile", "step", "save", "evaluation", "end", "restart", "restart, step")
JOINED = tuple(moment for moment in ALL_MOMENTS if moment not in ("start", "restart"))
"""All moments at which the processes have joined the job, or are joining it."""

LOST = "(of \\d )?(was lost|gave no sign of life for|did not|has not|no answer|not come|could not reach|ended: )"


@dataclass(frozen=True)
class Promise:
    """The promised end of a job after a fault: the exit codes of its launchers, a message, and the maximum time."""

    codes: frozenset[int]
    words: str = ""
    seconds: float = HEARTBEAT + SLACK

    def broken_by(self, codes: list[int | None], output: str) -> str:
        """Describe the broken part of the promise. Returns "" if the job kept its promise."""
        unexpected = [code for code in codes if code not in self.codes]
        if unexpected:
            return f"exit codes {codes}, expected each among {sorted(self.codes)}"
        # A launcher that was killed has a negative code.
        failed = any(code is not None and code > 0 for code in codes)
        if self.words and failed and not re.search(self.words, output):
            return f"no output matches {self.words!r}"
        return ""


@dataclass(frozen=True)
class Fault:
    """A fault that can be injected.

    Attributes:
        strike: Injects the fault. Its clean-up runs after the end of the job, or earlier if the fault `passes`.
        places: The topologies in which it can be injected.
        passes: Whether the fault ends by itself, and the job must continue.
        options: Additional options of the launchers.
    """

    strike: Strike
    promise: Promise
    places: tuple[str, ...] = ("two", "hosts")
    moments: tuple[str, ...] = ALL_MOMENTS
    passes: bool = False
    options: tuple[str, ...] = ()


CONTINUES = Promise(frozenset({0}), seconds=120)


def _codes(*codes: int) -> frozenset[int]:
    # The code is 0 if the fault comes too late, or too early to disturb the run.
    return frozenset({0, *codes})


ONCE = tuple(moment for moment in ALL_MOMENTS if not moment.startswith("restart"))
RESTARTS = ("--restarts", "3")
KILLED, PREEMPTED = 128 + signal.SIGKILL, 75
BEFORE_HANDLERS = 128 + signal.SIGTERM, 128 + signal.SIGINT
MEETING = START_TIMEOUT + SLACK
STOPPED = f"process \\d {LOST}|no answer in \\d+ s; is it process \\d"
WORKDIR_GONE = Promise(_codes(2), "was removed, moved or replaced|cannot be written")

FAULTS: dict[str, Fault] = {
    "process killed": Fault(kill_process, Promise(_codes(KILLED, 1), r"process \d: killed by SIGKILL", MEETING)),
    "keeper killed": Fault(kill_keeper, Promise(_codes(134, 1), f"process 1.*({LOST}|killed)"), moments=JOINED),
    "launcher killed": Fault(kill_launcher, Promise(_codes(-9, 1), "", MEETING)),
    "machine gone": Fault(kill_host, Promise(_codes(-9, 1), f"process \\d {LOST}", MEETING), places=("hosts",)),
    # On two hosts the launcher of the stopped process does not notice the fault, because the process cannot end.
    "process stopped": Fault(stop_process, Promise(_codes(KILLED, 1), STOPPED, MEETING), places=("two",)),
    "cable pulled": Fault(pull_cable, Promise(_codes(1), f"process \\d {LOST}", MEETING), places=("hosts",)),
    "disk full": Fault(fill_disk, Promise(_codes(2), "No space left on device"), places=("two",)),
    # During its start a job would create another work directory.
    "work directory removed": Fault(workdir_fault(removed, gone=True), WORKDIR_GONE, moments=JOINED),
    "work directory moved": Fault(workdir_fault(moved, gone=True), WORKDIR_GONE, moments=JOINED),
    "work directory replaced": Fault(workdir_fault(replaced), WORKDIR_GONE, moments=JOINED),
    "work directory covered": Fault(workdir_fault(covered), WORKDIR_GONE, places=("two",), moments=JOINED),
    "work directory read-only": Fault(
        workdir_fault(read_only), Promise(_codes(2), "Read-only file system"), places=("two",)
    ),
    "launcher asked to stop": Fault(
        signal_fault(signal.SIGTERM, "launcher"), Promise(_codes(PREEMPTED, *BEFORE_HANDLERS, -15, 1)), places=("two",)
    ),
    "Ctrl-C": Fault(
        signal_fault(signal.SIGINT, "launcher"), Promise(_codes(PREEMPTED, *BEFORE_HANDLERS, -2, 1)), places=("two",)
    ),
    "process asked to stop": Fault(
        signal_fault(signal.SIGTERM, "process"),
        Promise(_codes(PREEMPTED, *BEFORE_HANDLERS, 1), "asked to stop|SIGTERM", MEETING),
    ),
    "process paused": Fault(pause_fault("process", HEARTBEAT / 2), CONTINUES, passes=True),
    "launcher paused": Fault(pause_fault("launcher", 2 * HEARTBEAT), CONTINUES, passes=True),
    "cable loose": Fault(loose_cable, CONTINUES, places=("hosts",), passes=True),
    "process killed, restarts": Fault(kill_process, CONTINUES, moments=ONCE, passes=True, options=RESTARTS),
    "process stopped, restarts": Fault(stop_process, CONTINUES, moments=ONCE, passes=True, options=RESTARTS),
    # At the end the other process may be done.
    "launcher started again, restarts": Fault(
        start_launcher_again, CONTINUES, ("hosts",), ONCE[:-1], passes=True, options=RESTARTS
    ),
    "machine started again, restarts": Fault(
        start_host_again, CONTINUES, ("hosts",), ONCE[:-1], passes=True, options=RESTARTS
    ),
    # At other moments the run may have read all images that it needs.
    "store silent": Fault(
        silence_store,
        Promise(_codes(1), r"process \d made no progress for|minute|no byte came", 6 * STALL + SLACK),
        places=("store",),
        moments=("compile", "step", "save", "evaluation"),
    ),
    "store away": Fault(stop_store, CONTINUES, places=("store",), passes=True),
}
_MOUNTED = ("disk full", "work directory covered", "work directory read-only")
NEED_ROOT = tuple(name for name, fault in FAULTS.items() if fault.places == ("hosts",) or name in _MOUNTED)
