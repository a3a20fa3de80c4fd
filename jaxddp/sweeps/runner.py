"""Runs trials, one in each slot at a time, until there are no more, or ends them in bounded time."""

import contextlib
import math
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jaxddp.cluster.event_queue import EventQueue, catch_signals
from jaxddp.cluster.process_output import say
from jaxddp.cluster.restarts import PREEMPTED
from jaxddp.core.errors import InputError, JaxddpError
from jaxddp.sweeps.slots import Slot
from jaxddp.sweeps.trial_process import LOG_FILE, End, TrialProcess
from jaxddp.sweeps.trials import Trial

_POLL_SECONDS = 0.05
_PRUNE_SECONDS = 1.0
"""Seconds between two questions whether a trial is to be pruned."""
_DEATH_SECONDS = 30.0
"""The time that SIGKILL may take."""


class TrialSource(Protocol):
    """Decides which trial is started next, and records how trials ended."""

    def next(self) -> Trial | None:
        """Return the trial to start next; None if there is none at present."""
        ...

    def record_end(self, trial: Trial, end: End) -> None:
        """Record the end of a trial that `next` returned."""
        ...

    def should_prune(self, trial: Trial) -> bool:
        """Return whether a running trial is to be pruned."""
        ...


@dataclass(frozen=True)
class RunOptions:
    """How trials run.

    Attributes:
        restarts: how often a failed trial is started again.
        save_grace: seconds between SIGTERM and SIGKILL after a request to stop.
        shown: whether the output of the trials is printed on the screen, besides their log files.
        program: the words before the arguments of `jaxddp` in the command of each trial.
    """

    slots: Sequence[Slot]
    restarts: int = 1
    save_grace: float = 120.0
    shown: bool = False
    program: Sequence[str] = (sys.executable, "-m", "jaxddp")


class Runner:
    """Runs the trials of a source. A failed trial does not end the others; bad input ends the sweep.

    Args:
        folder: the folder of the sweep.
    """

    def __init__(self, folder: Path, source: TrialSource, options: RunOptions):
        self._folder, self._source, self._options = folder, source, options
        self._free, self._running = list(options.slots), list[TrialProcess]()
        self._ends, self._number = list[End](), 0
        self._received: signal.Signals | None = None
        self._error: JaxddpError | None = None
        self._has_lost_trial = False
        self._kill_at, self._prune_at = math.inf, 0.0

    def run(self) -> int:
        """Run trials until the source has no more. Call this function in the main thread.

        After the first SIGINT, SIGTERM or SIGHUP, all trials are asked to save and stop. A second Ctrl-C kills them.

        Returns:
            The exit code: 0 if all trials are done or pruned; 1 if one failed; 75 if trials were asked to stop and
            saved; 128 plus the signal that this process received if one of these failed or had to be killed.

        Raises:
            InputError: a trial reported bad input. The other trials were asked to save and stop.
            JaxddpError: the source raised it. The running trials were asked to save and stop.
        """
        with catch_signals() as events, selectors.DefaultSelector() as self._selector:
            self._selector.register(events, selectors.EVENT_READ)
            try:
                self._stop_on_error(self._fill)
                while self._running and time.monotonic() < self._kill_at:
                    self._wait(events)
                    for advance in (self._finish_ended, self._prune, self._fill):
                        self._stop_on_error(advance)
            finally:
                self._kill()
        if self._error is not None:
            raise self._error
        return self._code()

    @property
    def _is_stopping(self) -> bool:
        return self._received is not None or self._error is not None

    def _stop_on_error(self, call: Callable[[], None]) -> None:
        """Call a function that uses the source. After its first error, ask the running trials to save and stop."""
        try:
            call()
        except JaxddpError as error:
            if self._error is None:
                self._error = error
                self._stop_others("an error: the running trials were asked to save and stop")

    def _stop_others(self, line: str) -> None:
        if self._running and self._received is None:
            self._stop(line)

    def _fill(self) -> None:
        """Start trials in the free slots."""
        while self._free and not self._is_stopping and (trial := self._source.next()) is not None:
            self._number += 1
            say(f"{trial.name}: started, output in {self._folder / trial.name / LOG_FILE}")
            self._start(trial, self._free.pop(0))

    def _start(self, trial: Trial, slot: Slot, starts: int = 1) -> None:
        options = self._options
        process = TrialProcess.start(
            trial, self._folder, slot, options.program, self._number, starts=starts, shown=options.shown
        )
        self._running.append(process)
        self._selector.register(process.worker.output, selectors.EVENT_READ, process.worker.output)

    def _wait(self, events: EventQueue) -> None:
        """Copy available output, and handle signals."""
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.data is not None:
                key.data.read()
                if key.data.has_ended:
                    self._selector.unregister(key.data)
        for number in events.take_all():
            if self._received is not None and number == signal.SIGINT:
                self._kill_at = time.monotonic()
            elif self._received is None:
                self._received = number
                self._stop(f"{number.name}: every trial was asked to save and stop; another Ctrl-C kills them")

    def _stop(self, line: str) -> None:
        """Ask all trials to save and stop."""
        say(f"jaxddp sweep: {line}")
        self._kill_at = min(self._kill_at, time.monotonic() + self._options.save_grace)
        for process in self._running:
            process.worker.send(signal.SIGTERM)

    def _finish_ended(self) -> None:
        for process in [*self._running]:
            if process.worker.poll() is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(process.worker.output)
                process.close(time.monotonic() + _DEATH_SECONDS)
                self._running.remove(process)
                self._finish(process)

    def _finish(self, process: TrialProcess) -> None:
        """Record the end of a trial and free its slot, or start the trial again."""
        trial, end = process.trial, process.end
        if end == "failed":
            is_again = process.starts <= self._options.restarts and not (self._is_stopping or process.worker.has_quit)
            again = f"; started again ({process.starts} of {self._options.restarts})" if is_again else ""
            say(f"{trial.name}: failed with {process.how}: {process.last_line}{again}")
            if is_again:
                self._start(trial, process.slot, process.starts + 1)
                return
        if end == "bad input" and self._error is None:
            self._error = InputError(f"{trial.name}: {process.last_line}")
            self._stop_others("bad input: the other trials were asked to save and stop")
        self._has_lost_trial |= end == "failed" and self._received is not None
        self._ends.append(end)
        self._source.record_end(trial, end)
        self._free.append(process.slot)

    def _prune(self) -> None:
        if time.monotonic() < self._prune_at or self._is_stopping:
            return
        self._prune_at = time.monotonic() + _PRUNE_SECONDS
        for process in self._running:
            if not process.is_pruned and self._source.should_prune(process.trial):
                process.prune()

    def _kill(self) -> None:
        """Kill the processes that still run, and record their ends."""
        deadline = time.monotonic() + _DEATH_SECONDS
        for process in self._running:
            process.worker.send(signal.SIGKILL)
        for process in self._running:
            process.close(deadline)
            self._ends.append("failed")
            self._has_lost_trial = True
            self._stop_on_error(lambda trial=process.trial: self._source.record_end(trial, "interrupted"))

    def _code(self) -> int:
        if self._received is not None:
            return 128 + self._received if self._has_lost_trial else PREEMPTED
        if "failed" in self._ends:
            return 1
        return PREEMPTED if "interrupted" in self._ends else 0
