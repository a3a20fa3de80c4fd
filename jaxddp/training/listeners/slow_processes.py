"""Reports the process of a job that makes the other processes wait."""

import contextlib
import logging
import time
from collections.abc import Mapping

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.peers import Peers
from jaxddp.training.events import Listener, RunStart, StepRecord
from jaxddp.training.listeners.step_seconds import FILE, SlowPhase, Spent, StepSeconds

COMPARISON_SECONDS = 30.0
"""Seconds between two comparisons: long enough that single slow steps do not matter."""
_LOG_SECONDS = 600.0
_log = logging.getLogger("jaxddp.training")


class SlowProcesses(Listener):
    """A listener that compares the time of processes by phase. It logs a slow process, at most every ten minutes."""

    def __init__(self, peers: Peers):
        self._peers = peers

    def start(self, run: RunStart) -> None:
        self._file = None if run.workdir is None else run.workdir / FILE
        self._previous: Mapping[int, Spent] | None = None
        self._compared_at, self._logged_at = 0.0, dict[tuple[int, str], float]()

    def step(self, record: StepRecord) -> None:
        now = time.monotonic()
        if self._previous is not None and now - self._compared_at < COMPARISON_SECONDS:
            return
        spent = self._peers.spent()
        difference = None if self._previous is None else StepSeconds.between(self._previous, spent)
        if difference is not None:
            self._report(difference, now)
        if difference is not None or self._previous is None:
            self._previous, self._compared_at = spent, now

    def _report(self, spent: StepSeconds, now: float) -> None:
        if self._file is not None:
            # This file is optional. If the disk is full, writing a file that the run needs raises the error.
            with contextlib.suppress(InputError):
                files.replace(self._file, spent.dumps())
        slow = [each for each in spent.slow() if now - self._logged_at.get(_key(each), -_LOG_SECONDS) >= _LOG_SECONDS]
        if slow:
            self._logged_at |= {_key(each): now for each in slow}
            steps = f"seconds a step, from step {spent.first + 1:,} to {spent.last:,}:"
            _log.warning("\n".join([f"{slow[0]}; {steps}", *spent.table()]))


def _key(slow: SlowPhase) -> tuple[int, str]:
    return slow.process, slow.phase
