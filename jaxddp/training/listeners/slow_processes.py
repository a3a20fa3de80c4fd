"""Reports the process of a job that makes the others wait."""

import contextlib
import logging
import time
from collections.abc import Mapping

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.peers import Peers
from jaxddp.training.events import Listener, RunStart, StepRecord
from jaxddp.training.listeners.step_seconds import FILE, SlowPhase, Spent, StepSeconds

LOOK_SECONDS = 30.0
"""Seconds between two comparisons: long enough that single slow steps do not matter."""
_AGAIN_SECONDS = 600.0
_log = logging.getLogger("jaxddp.training")


class SlowProcesses(Listener):
    """Compares where the processes spend their time; logs a slow process with a table, at most every ten minutes."""

    def __init__(self, peers: Peers):
        self._peers = peers

    def start(self, run: RunStart) -> None:
        self._file = None if run.workdir is None else run.workdir / FILE
        self._before: Mapping[int, Spent] | None = None
        self._looked, self._logged = 0.0, dict[tuple[int, str], float]()

    def step(self, record: StepRecord) -> None:
        now = time.monotonic()
        if self._before is not None and now - self._looked < LOOK_SECONDS:
            return
        spent = self._peers.spent()
        difference = None if self._before is None else StepSeconds.between(self._before, spent)
        if difference is not None:
            self._report(difference, now)
        if difference is not None or self._before is None:
            self._before, self._looked = spent, now

    def _report(self, spent: StepSeconds, now: float) -> None:
        if self._file is not None:
            # This file is optional. If the disk is full, writing a file that the run needs raises the error.
            with contextlib.suppress(InputError):
                files.replace(self._file, spent.dumps())
        slow = [each for each in spent.slow() if now - self._logged.get(_key(each), -_AGAIN_SECONDS) >= _AGAIN_SECONDS]
        if slow:
            self._logged |= {_key(each): now for each in slow}
            steps = f"seconds a step, from step {spent.first + 1:,} to {spent.last:,}:"
            _log.warning("\n".join([f"{slow[0]}; {steps}", *spent.table()]))


def _key(slow: SlowPhase) -> tuple[int, str]:
    return slow.process, slow.phase
