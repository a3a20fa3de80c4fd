"""The progress of this process: its current phase, the steps it has done, and the seconds it has spent in each phase.

The training code reports its progress to this module, and the job's watchdog reads it (`jaxddp.job.watchdog`). No
result depends on the progress. Progress is the start or the end of a phase, the end of a step, or a call of `moved`
within a phase. A phase can have a description for users, which `show_on` shows on a screen if the phase is long, and an
amount of work, of which `reached` reports the completed part.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple

from jaxddp.core.errors import counted, duration, on_screen, size, speed

BYTES = "bytes"
"""The unit of an amount of bytes, which is shown in kB, MB and so on."""
OUTSIDE = "outside"
"""The phase of the user's own code. In this phase, a process is stuck only if other processes wait for it."""
Phase = Literal[
    "outside", "start", "agreement", "restore", "compile", "training", "input", "dispatch", "device", "listeners",
    "validation", "save",
]  # fmt: skip
COMMIT = "commit"
"""The phase "save" while a thread waits for the other processes to write their parts of a checkpoint."""
_PATIENCE: dict[str, float] = {"start": 6, "compile": 6, "restore": 3, "save": 3, COMMIT: 3, "validation": 3}
"""Factors of `parallel.stall_timeout`, the maximum time without progress. Other phases have factor 1."""
_WAITING = frozenset({"agreement", "dispatch", "device", COMMIT})
"""The phases in which a process may wait for other processes."""
PATIENCE_SECONDS = 1.0
"""The activity is shown after this time."""
_UPDATE_SECONDS = 0.5


class Activity(NamedTuple):
    """What a process does, for users.

    Attributes:
        description: such as "compiling the step"; "" if there is nothing to show.
        total: the amount of work, in the unit `noun`; 0 if it is unknown.
        began: the time at which it began, as `time.monotonic` returns it.
        done: the completed amount.
        note: further information, such as the speed.
    """

    description: str = ""
    total: int = 0
    noun: str = ""
    began: float = 0.0
    done: int = 0
    note: str = ""

    @property
    def seconds(self) -> float:
        """Seconds since the activity began."""
        return time.monotonic() - self.began

    @property
    def share(self) -> float | None:
        """The completed share, 0 to 1; None if the amount of work is unknown."""
        return min(self.done / self.total, 1.0) if self.total > 0 else None

    def details(self) -> str:
        """Return the completed amount, the elapsed and the remaining time: `512 of 1,024 files, 24 s, 24 s left`."""
        seconds, amount = self.seconds, []
        if self.done and self.noun == BYTES:
            amount = [f"{size(self.done)} of {size(self.total)}" if self.total else size(self.done)]
        elif self.done:
            of_total = f"{self.done:,} of {counted(self.total, self.noun)}" if self.total else ""
            amount = [of_total or counted(self.done, self.noun)]
        share = self.share
        left = [f"{_whole(seconds / share - seconds)} left"] if share and self.done < self.total else []
        return ", ".join([*amount, _whole(seconds), *left, *filter(None, [self.note])])


def _whole(seconds: float) -> str:
    """Return a duration without fractions of a second."""
    return f"{seconds:.0f} s" if seconds < 59.5 else duration(seconds)


def longest(timeout: float) -> float:
    """Return the longest time without progress in any phase, in seconds, for a `parallel.stall_timeout`."""
    return max(_PATIENCE.values()) * timeout


class Progress(NamedTuple):
    """The progress of a process.

    Attributes:
        phase: the current phase.
        step: the number of completed steps.
        idle: seconds since the last progress.
    """

    phase: str
    step: int
    idle: float

    @property
    def waits(self) -> bool:
        """Whether the process may be waiting for other processes."""
        return self.phase in _WAITING

    def limit(self, timeout: float) -> float:
        """Return the maximum idle time in seconds. A process that is idle for longer is stuck."""
        return _PATIENCE.get(self.phase, 1) * timeout

    def __str__(self) -> str:
        """Return a description for an error message."""
        done = f" after step {self.step:,}" if self.step else ""
        return f"made no progress for {self.idle:.0f} s{done}, in phase {self.phase!r}"


class _Tracker:
    def __init__(self) -> None:
        self.phase: Phase = OUTSIDE
        self.activity, self.step = Activity(), 0
        self.began = self.changed = time.monotonic()
        self.spent = dict[str, float]()
        self.thread: int | None = None
        self.work_began: float | None = None
        self.committing = set[int]()
        self.report: Callable[[str], object] = str

    def is_of_this_thread(self) -> bool:
        return self.thread in (None, threading.get_ident())

    def enter(self, phase: Phase, activity: Activity, thread: int | None) -> None:
        now, before = time.monotonic(), self.phase
        self.spent = self.spent | {before: self.spent.get(before, 0.0) + now - self.began}
        self.phase, self.began, self.changed = phase, now, now
        self.thread = thread
        is_new, self.activity = activity.description != self.activity.description, activity
        if is_new:
            self.report(activity.description)


_tracker = _Tracker()


def doing(description: str, total: int = 0, noun: str = "") -> AbstractContextManager[None]:
    """Set the description for users during the block. The phase does not change.

    Args:
        total: the amount of work, of which `reached` reports the completed part; 0 if it is unknown.
        noun: the unit of the amount: a noun in singular, or `jaxddp.core.phases.BYTES`.
    """
    return phase(_tracker.phase, description, total, noun)


def reached(done: int, note: str = "") -> None:
    """Report progress within the current activity: the completed amount, and a text such as the speed."""
    if _tracker.is_of_this_thread():
        _tracker.changed = time.monotonic()
        _tracker.activity = _tracker.activity._replace(done=done, note=note)


def activity() -> Activity:
    """Return the current activity."""
    return _tracker.activity


@contextmanager
def phase(name: Phase, description: str | None = None, total: int = 0, noun: str = "") -> Iterator[None]:
    """Enter a phase for the block or the decorated function, and return to the previous phase afterwards.

    If several threads of a process train, as in a notebook, only the first thread sets the phase until it ends.

    Args:
        description: a description for users, such as "saving step 400". "" shows nothing, and None keeps the previous
            description.
        total, noun: see `doing`.
    """
    if not _tracker.is_of_this_thread():
        yield
        return
    before = _tracker.phase, _tracker.activity, _tracker.thread
    # A part of an activity may have the same description. The activity goes on, and keeps its time and its progress.
    goes_on = description is None or (description == _tracker.activity.description and not total)
    activity = _tracker.activity if goes_on else Activity(description or "", total, noun, time.monotonic())
    _tracker.enter(name, activity, threading.get_ident())
    try:
        yield
    finally:
        _tracker.enter(before[0], _tracker.activity if goes_on else before[1], before[2])


@contextmanager
def reported_to(report: Callable[[str], None]) -> Iterator[None]:
    """Pass each new description to `report` during the block, instead of the previous function.

    The argument of `report` is "" if there is nothing to show, and at the end of the block.
    """
    before = _tracker.report
    before("")
    _tracker.report = report
    report(_tracker.activity.description)
    try:
        yield
    finally:
        _tracker.report = before
        report("")
        before(_tracker.activity.description)


@contextmanager
def hidden() -> Iterator[None]:
    """Hide the activity during the block, which prints a line."""
    _tracker.report("")
    try:
        yield
    finally:
        _tracker.report(_tracker.activity.description)


def repeat() -> None:
    """Pass the description to its listener again, so that it shows the present amount and time."""
    if _tracker.activity.description:
        _tracker.report(_tracker.activity.description)


def moved() -> None:
    """Report progress within a phase, such as a computed batch or a written file."""
    if _tracker.is_of_this_thread():
        _tracker.changed = time.monotonic()


def at_step(step: int) -> None:
    """Report the number of completed steps."""
    if _tracker.is_of_this_thread():
        _tracker.step, _tracker.changed = step, time.monotonic()


@contextmanager
def working() -> Iterator[None]:
    """Measure the time of the block for `worked`. A block within another block changes nothing."""
    before = _tracker.work_began
    _tracker.work_began = before or time.monotonic()
    try:
        yield
    finally:
        _tracker.work_began = before


def worked() -> float:
    """Return the seconds since the outermost block of `working` began; 0 outside of it."""
    return 0.0 if _tracker.work_began is None else time.monotonic() - _tracker.work_began


@contextmanager
def committing() -> Iterator[None]:
    """Report that this thread, which saves a checkpoint, waits for the other processes during the block."""
    thread = threading.get_ident()
    _tracker.committing.add(thread)
    try:
        yield
    finally:
        _tracker.committing.discard(thread)


def subtract_idle(seconds: float) -> None:
    """Subtract from the idle time the seconds in which the process did not run, for example because it was stopped."""
    _tracker.changed += seconds


def progress() -> Progress:
    """Return the progress of this process."""
    phase = COMMIT if _tracker.phase == "save" and _tracker.committing else _tracker.phase
    return Progress(phase, _tracker.step, max(0.0, time.monotonic() - _tracker.changed))


def spent() -> dict[str, float]:
    """Return the seconds of each phase until its last end, without the seconds of phases within it."""
    return _tracker.spent


def running_time() -> float:
    """Return a time in seconds, for differences, that stands still while a program is compiled."""
    return time.monotonic() - _tracker.spent.get("compile", 0.0)


def stuck(processes: Mapping[int, Progress], timeout: float) -> int | None:
    """Return the process that makes no progress and that all others wait for; None if there is none.

    A process that waits for others is not stuck while another process is busy. If all processes wait for each other,
    the process with the fewest steps is returned. Among several with the fewest steps, it is the process with the
    longest idle time.

    Args:
        processes: the progress of all processes that have not ended.
        timeout: `parallel.stall_timeout`, seconds.
    """
    is_any_waiting = any(progress.waits for progress in processes.values())
    # A process in the user's own code is watched only while other processes wait.
    watched = {process: state for process, state in processes.items() if state.phase != OUTSIDE or is_any_waiting}
    busy = {process: state for process, state in watched.items() if not state.waits}
    over = {process: state for process, state in (busy or watched).items() if state.idle > state.limit(timeout)}
    return min(over, key=lambda process: (over[process].step, -over[process].idle, process), default=None)


@contextmanager
def show_on(show: Callable[[Activity], None], clear: Callable[[], None]) -> Iterator[None]:
    """Show long activities on a screen during the block. At its end, clear the screen and end the thread.

    Args:
        show: displays an activity. It is called repeatedly while the activity lasts.
        clear: removes the activity, because it ends or the next activity begins.
    """
    lock, is_over, is_here = threading.Lock(), threading.Event(), False

    def begin(description: str) -> None:
        nonlocal is_here
        with lock:
            clear()
            is_here = bool(description)

    def run() -> None:
        while not is_over.wait(_UPDATE_SECONDS):
            with lock:
                if is_here and (current := activity()).seconds >= PATIENCE_SECONDS:
                    show(current)
            if not is_here:
                # Another display may show the activity, such as the live display of a run.
                repeat()

    thread = threading.Thread(target=run, name="jaxddp-activity", daemon=True)
    thread.start()
    try:
        with reported_to(begin):
            yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def counting_images(description: str, total: int) -> Iterator[Callable[..., None]]:
    """Report the activity of reading images, with their number and speed.

    Yield a function to call for each image, with the number of images that are done, the number of these that cannot be
    used, and a line to print about this one, if any.
    """
    started = time.monotonic()

    def progress(done: int, faults: int, line: str | None = None) -> None:
        if line is not None:
            with hidden():
                print(on_screen(line), flush=True)
        pace = speed(done / max(time.monotonic() - started, 1e-9))
        reached(done, f"{pace} images/s{f', {faults:,} cannot be used' if faults else ''}")

    with doing(description, total, "image"):
        yield progress
