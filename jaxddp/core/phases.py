"""The progress of this process: its current phase, the steps it has done, and the seconds it has spent in each phase.

The code that does the work reports its progress here, as it would to a log; no result depends on it. The job's watchdog
reads it (`jaxddp.job.watchdog`). Progress is a phase that begins or ends, a step that is done, or a call of `moved`
within a phase. A phase can also have a description for users, which is passed to a listener while it lasts
(`jaxddp.job.activity`).
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

OUTSIDE = "outside"
"""The phase of a program's own code, which need not make progress."""
Phase = Literal[
    "outside", "start", "agreement", "restore", "compile", "training", "input", "dispatch", "device", "listeners",
    "validation", "save",
]  # fmt: skip
COMMIT = "commit"
"""The phase "save", while one of its threads waits for the other processes to write their parts."""
_PATIENCE: dict[str, float] = {"start": 6, "compile": 6, "restore": 3, "save": 3, COMMIT: 3, "validation": 3}
"""Factors of `parallel.stall_timeout`: the time that a phase may last without progress. Other phases have factor 1."""
_WAITING = frozenset({"agreement", "dispatch", "device", COMMIT})
"""The phases in which a process may wait for others."""


def longest(timeout: float) -> float:
    """Return the longest time without progress that any phase allows, in seconds.

    Args:
        timeout: `parallel.stall_timeout`, seconds.
    """
    return max(_PATIENCE.values()) * timeout


class Progress(NamedTuple):
    """The progress of a process.

    Attributes:
        phase: the current phase.
        step: how many steps are done.
        idle: seconds since the last progress.
    """

    phase: str
    step: int
    idle: float

    @property
    def waits(self) -> bool:
        """Whether the process may be waiting for others."""
        return self.phase in _WAITING

    def limit(self, timeout: float) -> float:
        """Return the number of idle seconds after which the process is considered stuck."""
        return _PATIENCE.get(self.phase, 1) * timeout

    def __str__(self) -> str:
        """Return the description that an error message contains."""
        done = f" after step {self.step:,}" if self.step else ""
        return f"made no progress for {self.idle:.0f} s{done}, in phase {self.phase!r}"


class _Tracker:
    def __init__(self) -> None:
        self.phase, self.description, self.step = OUTSIDE, "", 0
        self.began = self.changed = time.monotonic()
        self.spent = dict[str, float]()
        self.thread: int | None = None
        self.committing = set[int]()
        self.report: Callable[[str], None] = _ignore

    def is_of_this_thread(self) -> bool:
        return self.thread in (None, threading.get_ident())

    def enter(self, phase: str, description: str, thread: int | None) -> None:
        now, before = time.monotonic(), self.phase
        self.spent = self.spent | {before: self.spent.get(before, 0.0) + now - self.began}
        self.phase, self.began, self.changed = phase, now, now
        self.thread = thread
        if description != self.description:
            self.description = description
            self.report(description)


def _ignore(description: str) -> None:
    """Report nothing."""


_tracker = _Tracker()


@contextmanager
def phase(name: Phase, description: str | None = None) -> Iterator[None]:
    """Enter a phase for the block, and return to the previous one after it.

    If several threads of a process train, as in a notebook, only the first one sets the phase until it is done.

    Args:
        description: what the process does, for users, such as "saving step 400". "" shows nothing, and None keeps the
            previous description.
    """
    with _within(name, description):
        yield


@contextmanager
def doing(description: str) -> Iterator[None]:
    """Describe, for users, what this process does in the block, without a change of the phase."""
    with _within(_tracker.phase, description):
        yield


@contextmanager
def _within(name: str, description: str | None) -> Iterator[None]:
    if not _tracker.is_of_this_thread():
        yield
        return
    before = _tracker.phase, _tracker.description, _tracker.thread
    _tracker.enter(name, _tracker.description if description is None else description, threading.get_ident())
    try:
        yield
    finally:
        _tracker.enter(*before)


@contextmanager
def reported_to(report: Callable[[str], None]) -> Iterator[None]:
    """During the block, pass each new description to `report`, which replaces the previous function.

    The argument of `report` is "" if there is nothing to show, and at the end of the block.
    """
    before, description = _tracker.report, _tracker.description
    before("")
    _tracker.report = report
    report(description)
    try:
        yield
    finally:
        _tracker.report = before
        report("")
        before(_tracker.description)


def moved() -> None:
    """Report progress within a phase: a batch is done, or a file was written."""
    if _tracker.is_of_this_thread():
        _tracker.changed = time.monotonic()


def at_step(step: int) -> None:
    """Report how many steps are done."""
    if _tracker.is_of_this_thread():
        _tracker.step, _tracker.changed = step, time.monotonic()


@contextmanager
def committing() -> Iterator[None]:
    """Mark this thread, which saves a checkpoint, as waiting for the other processes during the block."""
    thread = threading.get_ident()
    _tracker.committing.add(thread)
    try:
        yield
    finally:
        _tracker.committing.discard(thread)


def excuse(seconds: float) -> None:
    """Do not count these seconds as idle, because the process was not running, for example while it was stopped."""
    _tracker.changed += seconds


def progress() -> Progress:
    """Return the progress of this process."""
    phase = COMMIT if _tracker.phase == "save" and _tracker.committing else _tracker.phase
    return Progress(phase, _tracker.step, max(0.0, time.monotonic() - _tracker.changed))


def spent() -> dict[str, float]:
    """Return the seconds spent in each phase that has ended, without the seconds of phases within it."""
    return _tracker.spent


def stuck(processes: Mapping[int, Progress], timeout: float) -> int | None:
    """Return the process that makes no progress and that all others wait for; None if there is none.

    A process that waits for others is not stuck while another one is busy. If all wait for each other, the one that has
    done the fewest steps is returned. If several have done equally few, the one that has been idle longest is returned.

    Args:
        processes: the progress of all processes that have not ended.
        timeout: `parallel.stall_timeout`, seconds.
    """
    waited_for = any(one.waits for one in processes.values())
    # A program's own code need not make progress, unless others wait for it.
    inside = {process: one for process, one in processes.items() if one.phase != OUTSIDE or waited_for}
    busy = {process: one for process, one in inside.items() if not one.waits}
    over = {process: one for process, one in (busy or inside).items() if one.idle > one.limit(timeout)}
    return min(over, key=lambda process: (over[process].step, -over[process].idle, process), default=None)
