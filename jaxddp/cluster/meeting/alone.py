"""A launcher that knows all of its job from its options: that of one machine, or of several that never start again."""

import secrets
import time
from typing import Any

from jaxddp.cluster.inbox import Inbox
from jaxddp.cluster.meeting.gathering import Generation, Quit, listen_at, name_of, wait_for
from jaxddp.cluster.meeting.notes import Assignment
from jaxddp.cluster.options import Launch
from jaxddp.cluster.output import say
from jaxddp.cluster.restarts import PREEMPTED, Budget, End, decide
from jaxddp.cluster.worker_group import WorkerGroup
from jaxddp.core.errors import JaxddpError
from jaxddp.job.ports import address_of


class Alone:
    """Gathers nobody; see `jaxddp.cluster.meeting.gathering.Gathering`.

    Args:
        processes: of this machine.
    """

    def __init__(self, options: Launch, processes: int, inbox: Inbox):
        self.code = 0
        self._options, self._processes, self._inbox = options, processes, inbox
        self._budget = Budget(options.restarts)
        several = options.machines.most > 1
        self._name = options.run_id or (name_of(options) if several else secrets.token_hex(8))
        self._generation, self._began = -1, 0.0
        self._end: End | None = None

    def meet(self) -> Generation | None:
        try:
            return self._next() if self._end is None or self._goes_on(self._end) else None
        except Quit as quit_:
            self.code = quit_.code
            return None

    def hear(self, event: Any, group: WorkerGroup) -> None:
        """Nobody says anything."""

    def failed(self, end: End) -> None:
        """Nobody is to be told."""

    def ended(self, end: End) -> None:
        self._end = end

    def close(self, error: JaxddpError | None = None) -> None:
        """Nobody is to be told."""

    def _goes_on(self, end: End) -> bool:
        ran = time.monotonic() - self._began
        failure = end if end.code not in (0, PREEMPTED) else None
        found = decide({self._options.nr or 0: end}, failure, self._budget, ran)
        if isinstance(found, int):
            self.code = found
            return False
        say(f"jaxddp launch: {found.line}")
        self._budget, until = found.budget, time.monotonic() + found.delay
        while wait_for(self._inbox, until, lambda event: None):
            pass
        return True

    def _next(self) -> Generation:
        options = self._options
        listener = None if options.nr else listen_at(options)
        coordinator = options.coordinator or (address_of(listener) if listener else "")
        self._generation += 1
        self._began = time.monotonic()
        # The first has the plain name: several machines whose launchers do not meet have no other.
        name = f"{self._name}.{self._generation}" if self._generation else self._name
        total = options.machines.most * self._processes
        assignment = Assignment(self._generation, (options.nr or 0) * self._processes, total, coordinator, name)
        return Generation(assignment, listener)
