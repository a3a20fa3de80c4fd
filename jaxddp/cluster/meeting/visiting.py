"""The launcher of another machine than 0: it does what that of machine 0 decides."""

import time
from typing import Any

from jaxddp.cluster.inbox import Inbox
from jaxddp.cluster.meeting.conversation import Arrived, Gone, Heard
from jaxddp.cluster.meeting.gathering import Generation, Quit, facts_of, job_of_launchers, wait_for
from jaxddp.cluster.meeting.notes import Assignment, Ended, Failed, Over, Stop, Told, shortened
from jaxddp.cluster.meeting.visitor import Unreached, Visitor
from jaxddp.cluster.options import Launch
from jaxddp.cluster.output import say
from jaxddp.cluster.restarts import End
from jaxddp.cluster.worker_group import WorkerGroup
from jaxddp.core.errors import JaxddpError, Unreachable

_LET_IN_SECONDS = 60.0
"""How long machine 0 may take at most, once it is reached, to let this one in."""


class Visiting:
    """See `jaxddp.cluster.meeting.gathering.Gathering`. Only the main thread uses it."""

    def __init__(self, options: Launch, processes: int, key: str, inbox: Inbox):
        self.code = 1
        self._options, self._inbox = options, inbox
        self._visitor = Visitor(job_of_launchers(options, key), facts_of(options, processes), inbox)
        self._reached = self._was_reached = False
        self._generation = 0
        self._assignment: Assignment | None = None
        self._end: End | None = None
        self._over: Over | None = None
        self._asked = False

    def meet(self) -> Generation | None:
        try:
            self._assignment = None
            while self._assignment is None:
                self._check_end()
                if self._reached:
                    wait_for(self._inbox, None, self.hear)
                else:
                    self._reach()
        except Quit as quit_:
            self.code, self._asked = quit_.code, quit_.asked
            return None
        self._generation, self._end = self._assignment.generation, None
        return Generation(self._assignment)

    def hear(self, event: Any, group: WorkerGroup | None = None) -> None:
        """Follow what machine 0 says; `group` are the processes of this one that run."""
        note = event.note if isinstance(event, Heard) else None
        if isinstance(event, Unreached):
            self._give_up(event.error)
        elif isinstance(event, Arrived):
            self._reached = self._was_reached = True
        elif isinstance(event, Gone):
            self._reached = False
            if self._over is None:
                say(f"jaxddp launch: machine 0 {event.reason}")
        elif isinstance(note, Told):
            say(f"jaxddp launch: {note.line}")
        elif isinstance(note, Assignment):
            self._assignment = note
        elif isinstance(note, Over):
            self._over = note
        if group is not None:
            self._stop(note, group)

    def failed(self, end: End) -> None:
        self._visitor.send(Failed(self._generation, end.code, shortened(end.cause)))

    def ended(self, end: End) -> None:
        self._end = end
        self._visitor.send(Ended(self._generation, end.code, shortened(end.cause), end.asked, end.quits))

    def close(self, error: JaxddpError | None = None) -> None:
        if error is not None:
            self._visitor.close(Ended(self._generation, error.exit_code, shortened(str(error)), asked=False))
        elif self._asked:
            self._visitor.close(Ended(self._generation, self.code, "asked to stop", asked=True))
        else:
            self._visitor.close()

    def _stop(self, note: Any, group: WorkerGroup) -> None:
        if isinstance(note, Stop) and note.generation == self._generation:
            group.stop_with_others(saved=note.saved)
        elif not self._reached or self._over is not None:
            group.stop_with_others(saved=False)

    def _check_end(self) -> None:
        """Raises: Quit; the job is over, or over for this machine."""
        if self._over is not None:
            raise Quit(self._over.code)
        if self._end is None:
            return
        if self._end.asked and (self._options.machines.elastic or not self._reached):
            raise Quit(self._end.code)
        if not self._reached and not self._options.restarts:
            raise Quit(self._end.code or 1)

    def _reach(self) -> None:
        """Wait until machine 0 is reached. Raises: InputError, Unreachable, where it never was; Quit."""
        seconds = self._options.wait
        again = " again" if self._was_reached else ""
        say(f"jaxddp launch: reaching machine 0 at {self._options.coordinator}{again}, for up to {seconds:g} s")
        self._visitor.reach(seconds)
        give_up = time.monotonic() + seconds + _LET_IN_SECONDS
        while not self._reached:
            if not wait_for(self._inbox, give_up, self.hear):
                self._give_up(Unreachable(f"--coordinator {self._options.coordinator}: no answer"))

    def _give_up(self, error: JaxddpError) -> None:
        if not self._was_reached:
            raise error
        say(f"jaxddp launch: {error}")
        raise Quit(self._end.code if self._end and self._end.code else 1)
