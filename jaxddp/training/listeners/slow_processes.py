"""Says which process of a job makes the others wait."""

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
"""Between two looks: long enough that single slow steps do not matter."""
_AGAIN_SECONDS = 600.0
_log = logging.getLogger("jaxddp.training")


class SlowProcesses(Listener):
    """Looks at where the processes' seconds went; a slow one is said with a table, and once more after ten minutes."""

    def __init__(self, peers: Peers):
        self._peers = peers

    def start(self, run: RunStart) -> None:
        self._file = None if run.workdir is None else run.workdir / FILE
        self._before: Mapping[int, Spent] | None = None
        self._looked, self._told = 0.0, dict[tuple[int, str], float]()

    def step(self, record: StepRecord) -> None:
        now = time.monotonic()
        if self._before is not None and now - self._looked < LOOK_SECONDS:
            return
        spent = self._peers.spent()
        found = None if self._before is None else StepSeconds.between(self._before, spent)
        if found is not None:
            self._say(found, now)
        if found is not None or self._before is None:
            self._before, self._looked = spent, now

    def _say(self, found: StepSeconds, now: float) -> None:
        if self._file is not None:
            # A full disk is found by what the run needs.
            with contextlib.suppress(InputError):
                files.replace(self._file, found.dumps())
        slow = [each for each in found.slow() if now - self._told.get(_place(each), -_AGAIN_SECONDS) >= _AGAIN_SECONDS]
        if slow:
            self._told |= {_place(each): now for each in slow}
            steps = f"seconds a step, from step {found.first + 1:,} to {found.last:,}:"
            _log.warning("\n".join([f"{slow[0]}; {steps}", *found.table()]))


def _place(slow: SlowPhase) -> tuple[int, str]:
    return slow.process, slow.phase
