"""How far this process has come: the phase that it is in, the steps that it has done, and where its seconds went.

It is told as a log is: what is at work says so here, and nothing that is computed depends on it. The thread that trains
tells it, and the job's watch reads it (`jaxddp.job.watchdog`). Progress is a phase that begins or ends, a step that is
done, or something within a phase that calls `moved`. What a phase does can be said in words, which whoever listens
shows while they last (`jaxddp.job.activity`).
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

OUTSIDE = "outside"
"""The phase of a program that does what is its own business, of which nothing is expected."""
Phase = Literal[
    "outside", "start", "agreement", "restore", "compile", "training", "input", "dispatch", "device", "listeners",
    "validation", "save",
]  # fmt: skip
COMMIT = "commit"
"""What "save" is called while a thread of it waits for the other processes to write their parts."""
_PATIENCE: dict[str, float] = {"start": 6, "compile": 6, "restore": 3, "save": 3, COMMIT: 3, "validation": 3}
"""How many times `parallel.stall_timeout` a phase may take without progress, where that is more than once."""
_WAITING = frozenset({"agreement", "dispatch", "device", COMMIT})
"""Where a process may wait for others."""


def longest(timeout: float) -> float:
    """After how many seconds a process counts as stuck in the phase that may take longest."""
    return max(_PATIENCE.values()) * timeout


class Standing(NamedTuple):
    """Where a process stands: its phase, the steps that it has done, and the seconds since its last progress."""

    phase: str
    step: int
    idle: float

    @property
    def waits(self) -> bool:
        """Whether it may be for others that there is no progress."""
        return self.phase in _WAITING

    def limit(self, timeout: float) -> float:
        """After how many seconds it counts as stuck."""
        return _PATIENCE.get(self.phase, 1) * timeout

    def __str__(self) -> str:
        """As an error message has it."""
        done = f" after step {self.step:,}" if self.step else ""
        return f"made no progress for {self.idle:.0f} s{done}, in phase {self.phase!r}"


class _Progress:
    def __init__(self) -> None:
        self.phase, self.words, self.step = OUTSIDE, "", 0
        self.begun = self.changed = time.monotonic()
        self.spent = dict[str, float]()
        self.thread: int | None = None
        self.committing = set[int]()
        self.tell: Callable[[str], None] = _to_nobody

    def is_of_this_thread(self) -> bool:
        return self.thread in (None, threading.get_ident())

    def enter(self, phase: str, words: str, thread: int | None) -> None:
        now, before = time.monotonic(), self.phase
        self.spent = self.spent | {before: self.spent.get(before, 0.0) + now - self.begun}
        self.phase, self.begun, self.changed = phase, now, now
        self.thread = thread
        if words != self.words:
            self.words = words
            self.tell(words)


def _to_nobody(words: str) -> None:
    """Where nothing is shown."""


_own = _Progress()


@contextmanager
def phase(name: Phase, words: str | None = None) -> Iterator[None]:
    """This process is in a phase during the block, and in that of before after it.

    Where several threads of a process train, as in a notebook, that of the first counts until it is done.

    Args:
        words: what it does, for people, such as "saving step 400"; "" shows nothing, and None what was shown before.
    """
    with _within(name, words):
        yield


@contextmanager
def doing(words: str) -> Iterator[None]:
    """During the block this process does what the words say, in the phase in which it is."""
    with _within(_own.phase, words):
        yield


@contextmanager
def _within(name: str, words: str | None) -> Iterator[None]:
    if not _own.is_of_this_thread():
        yield
        return
    before = _own.phase, _own.words, _own.thread
    _own.enter(name, _own.words if words is None else words, threading.get_ident())
    try:
        yield
    finally:
        _own.enter(*before)


@contextmanager
def told_to(tell: Callable[[str], None]) -> Iterator[None]:
    """During the block one listener, and none of before, is told at once what this process begins to do.

    It hears "" where there is nothing to show, and at the end of the block.
    """
    before, words = _own.tell, _own.words
    before("")
    _own.tell = tell
    tell(words)
    try:
        yield
    finally:
        _own.tell = before
        tell("")
        before(_own.words)


def moved() -> None:
    """The phase goes on: a batch of it is done, a file was written."""
    if _own.is_of_this_thread():
        _own.changed = time.monotonic()


def at_step(step: int) -> None:
    """So many steps are done."""
    if _own.is_of_this_thread():
        _own.step, _own.changed = step, time.monotonic()


@contextmanager
def committing() -> Iterator[None]:
    """This thread, which saves, waits for the other processes during the block."""
    own = threading.get_ident()
    _own.committing.add(own)
    try:
        yield
    finally:
        _own.committing.discard(own)


def excuse(seconds: float) -> None:
    """This process did not get to run for so long, as where it was stopped, and could make no progress."""
    _own.changed += seconds


def standing() -> Standing:
    """Where this process stands."""
    phase = COMMIT if _own.phase == "save" and _own.committing else _own.phase
    return Standing(phase, _own.step, max(0.0, time.monotonic() - _own.changed))


def spent() -> dict[str, float]:
    """The seconds that this process has spent in each phase that has ended, without those of phases within it."""
    return _own.spent


def stuck(standings: Mapping[int, Standing], timeout: float) -> int | None:
    """The process that the others wait for and that makes no progress; None where there is none, or may be none.

    One that waits for others is not to blame while another is at something of its own. Where all wait for each other,
    the one that has done the fewest steps is named, and of several the one that has waited longest.

    Args:
        standings: of all processes that have not ended.
        timeout: `parallel.stall_timeout`, seconds.
    """
    waited_for = any(own.waits for own in standings.values())
    # What a program does outside is its own business, unless others wait for it.
    inside = {process: own for process, own in standings.items() if own.phase != OUTSIDE or waited_for}
    busy = {process: own for process, own in inside.items() if not own.waits}
    over = {process: own for process, own in (busy or inside).items() if own.idle > own.limit(timeout)}
    return min(over, key=lambda process: (over[process].step, -over[process].idle, process), default=None)
