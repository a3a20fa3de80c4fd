"""The launcher of machine 0: it knows who is there, starts each generation, and decides what follows it."""

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxddp.cluster.inbox import Inbox
from jaxddp.cluster.meeting.conversation import Arrived, Gone, Heard
from jaxddp.cluster.meeting.door import Door
from jaxddp.cluster.meeting.gathering import (
    Generation,
    Quit,
    facts_of,
    job_of_launchers,
    listen_at,
    name_of,
    wait_for,
)
from jaxddp.cluster.meeting.notes import Assignment, Ended, Failed, Over, Stop, Told, shortened
from jaxddp.cluster.options import Launch
from jaxddp.cluster.output import say
from jaxddp.cluster.restarts import PREEMPTED, Budget, End, decide
from jaxddp.cluster.worker_group import WorkerGroup
from jaxddp.core.errors import JaxddpError, Unreachable
from jaxddp.core.wording import counted
from jaxddp.job.ports import address_of, listen


@dataclass(frozen=True)
class _TimeToGrow:
    generation: int


class Hosting:
    """See `jaxddp.cluster.meeting.gathering.Gathering`. Only the main thread uses it.

    Args:
        processes: of each machine.
        sizes: numbers of machines that the job may have.
        key: of the job; empty where it has none.
    """

    def __init__(self, options: Launch, processes: int, sizes: Sequence[int], key: str, inbox: Inbox):
        self.code = 1
        self._options, self._processes, self._sizes, self._inbox = options, processes, sorted(sizes), inbox
        self._elastic = options.machines.elastic
        self._budget = Budget(options.restarts)
        listener = listen_at(options)
        self._host = listener.getsockname()[0]
        # Another life of this launcher counts its generations from 0, too.
        self._name = f"{name_of(options)}.{secrets.token_hex(4)}"
        self._present = {0: socket.gethostname()}
        self._changed = time.monotonic()
        self._generation, self._began, self._growing = -1, 0.0, False
        self._members: list[int] = []
        self._ends: dict[int, End] = {}
        self._failure: End | None = None
        self._door = Door(listener, job_of_launchers(options, key), facts_of(options, processes), inbox)

    def meet(self) -> Generation | None:
        try:
            if self._members and not self._goes_on():
                return None
            self._gather()
            return self._start()
        except Quit as quit_:
            self.code = quit_.code
            return None

    def hear(self, event: Any, group: WorkerGroup | None = None) -> None:
        """Take note of what became of another machine; `group` are the processes of this one that run."""
        if isinstance(event, Arrived):
            self._present[event.machine] = event.host
            self._changed = time.monotonic()
            say(f"jaxddp launch: machine {event.machine} ({event.host}) is there")
            if self._pending():
                left = self._began + self._options.join_after - time.monotonic()
                self._door.remind(max(left, 0), _TimeToGrow(self._generation))
        elif isinstance(event, Gone):
            if self._present.pop(event.machine, None):
                self._changed = time.monotonic()
            self._note_end(event.machine, End(1, f"machine {event.machine} {event.reason}"), group)
        elif isinstance(event, Heard) and isinstance(event.note, Failed):
            if event.note.generation == self._generation and event.machine in self._pending():
                self._note_failure(End(event.note.code, event.note.cause), group)
        elif isinstance(event, Heard) and isinstance(event.note, Ended):
            self._hear_end(event.machine, event.note, group)
        elif isinstance(event, _TimeToGrow):
            self._grow(event.generation, group)

    def failed(self, end: End) -> None:
        self._note_failure(end, None)

    def ended(self, end: End) -> None:
        self._note_end(0, end, None)

    def close(self, error: JaxddpError | None = None) -> None:
        if error is not None:
            self._door.close(Told(shortened(f"machine 0: {error}")), Over(error.exit_code))
        else:
            self._door.close(Over(self.code))

    def _pending(self) -> set[int]:
        """Machines whose processes have not ended."""
        return set(self._members) - self._ends.keys()

    def _hear_end(self, machine: int, note: Ended, group: WorkerGroup | None) -> None:
        if note.asked and self._elastic:
            # It leaves; that its connection ends is no news.
            self._present.pop(machine, None)
        if machine in self._pending() and (note.asked or note.generation == self._generation):
            self._note_end(machine, End(note.code, note.cause, note.asked, note.quits), group)
        elif note.asked and not self._elastic and not self._pending():
            say(f"jaxddp launch: machine {machine}: {note.cause}")
            raise Quit(note.code)
        elif note.asked and machine in self._ends:
            # Its processes had ended before; it counts once those of the others have, too.
            self._ends[machine] = replace(self._ends[machine], asked=True)

    def _note_end(self, machine: int, end: End, group: WorkerGroup | None) -> None:
        if machine not in self._pending():
            return
        self._ends[machine] = end
        if end.code == PREEMPTED:
            self._stop(group, saved=True)
        elif end.code != 0:
            self._note_failure(end, group)

    def _note_failure(self, failure: End, group: WorkerGroup | None) -> None:
        if self._failure is None:
            self._failure = failure
            self._stop(group, saved=False)

    def _stop(self, group: WorkerGroup | None, *, saved: bool) -> None:
        """The machines end as the processes of one do."""
        for other in self._pending() - {0}:
            self._door.send(other, Stop(self._generation, saved))
        if group is not None:
            group.stop_with_others(saved=saved)

    def _grow(self, generation: int, group: WorkerGroup | None) -> None:
        size = self._size()
        if generation != self._generation or group is None or self._growing or self._failure or size is None:
            return
        if size > len(self._members) and self._pending() == set(self._members):
            self._growing = True
            self._tell(f"{size} machines are there; all save, and start again with them")
            group.save()

    def _goes_on(self) -> bool:
        while self._pending():
            wait_for(self._inbox, None, self.hear)
        ran = time.monotonic() - self._began
        found = decide(self._ends, self._failure, self._budget, ran, elastic=self._elastic, growing=self._growing)
        self._members = []
        if isinstance(found, int):
            self.code = found
            return False
        self.code = PREEMPTED if self._failure is None else self._failure.code
        self._budget, until = found.budget, time.monotonic() + found.delay
        self._tell(found.line)
        while wait_for(self._inbox, until, self.hear):
            pass
        return True

    def _size(self) -> int | None:
        """How many machines of those that are there may start; None where it takes more."""
        return max((size for size in self._sizes if size <= len(self._present)), default=None)

    def _gather(self) -> None:
        """Wait for the machines. Raises: Unreachable at first, Quit later; too few came in time."""
        give_up = time.monotonic() + self._options.wait
        while (size := self._size()) != self._sizes[-1]:
            until = give_up if size is None else min(self._changed + self._options.settle, give_up)
            if not wait_for(self._inbox, until, self.hear):
                if size is None:
                    raise self._too_few()
                return

    def _too_few(self) -> Exception:
        there = ", ".join(f"{machine} ({host})" for machine, host in sorted(self._present.items()))
        line = (
            f"{len(self._present)} of at least {counted(self._sizes[0], 'machine')} came in {self._options.wait:g} "
            f"s: {there}; start the others, or raise --wait"
        )
        if self._generation < 0:
            return Unreachable(f"--nodes {self._options.nodes}: {line}")
        say(f"jaxddp launch: {line}")
        return Quit(self.code)

    def _start(self) -> Generation:
        size = self._size()
        assert size is not None
        self._members = sorted(self._present)[:size]
        self._ends, self._failure, self._growing, self._began = {}, None, False, time.monotonic()
        self._generation += 1
        listener = listen(self._host, 0)
        assignments = self._assignments(address_of(listener))
        if spare := sorted(self._present.keys() - assignments.keys()):
            names = " and ".join(f"machine {machine}" for machine in spare)
            self._tell(f"{names} wait{'s' * (len(spare) == 1)} as a spare: the batch is shared by {size}")
        for machine, assignment in assignments.items():
            if machine:
                self._door.send(machine, assignment)
        return Generation(assignments[0], listener)

    def _assignments(self, coordinator: str) -> Mapping[int, Assignment]:
        number, each = self._generation, self._processes
        total, run_id = len(self._members) * each, f"{self._name}.{number}"
        return {
            machine: Assignment(number, index * each, total, coordinator, run_id)
            for index, machine in enumerate(self._members)
        }

    def _tell(self, line: str) -> None:
        say(f"jaxddp launch: {line}")
        for machine in self._present:
            self._door.send(machine, Told(shortened(line)))
