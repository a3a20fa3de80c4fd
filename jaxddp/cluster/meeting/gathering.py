"""What a launcher asks of those of the other machines: where its processes belong, and whether they start again."""

import hashlib
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from jaxddp.cluster.inbox import Inbox
from jaxddp.cluster.meeting.notes import Assignment
from jaxddp.cluster.options import Launch
from jaxddp.cluster.output import say
from jaxddp.cluster.restarts import End
from jaxddp.cluster.worker_group import WorkerGroup
from jaxddp.core.errors import JaxddpError, about
from jaxddp.job.environment import KEY, Job
from jaxddp.job.ports import LOOPBACK, is_loopback, listen, split_address


@dataclass(frozen=True)
class Generation:
    """One start of the whole job, as a machine sees it."""

    assignment: Assignment
    listener: socket.socket | None = None
    """At the coordinator's address; process 0 of the job inherits it."""


class Gathering(Protocol):
    """The launchers of a job, seen from one of them.

    Attributes:
        code: of the job, once it is at its end.
    """

    code: int

    def meet(self) -> Generation | None:
        """Wait for what follows the last generation; None for the end of the job.

        Raises:
            Unreachable: the others do not come in time.
            InputError: their options do not fit to each other, or an address is none.
        """
        ...

    def hear(self, event: Any, group: WorkerGroup) -> None:
        """While the processes of a generation run, something became of another launcher."""
        ...

    def failed(self, end: End) -> None:
        """A process of this machine was the first here to fail; the others are about to end."""
        ...

    def ended(self, end: End) -> None:
        """The processes of this machine have ended."""
        ...

    def close(self, error: JaxddpError | None = None) -> None:
        """Part from the others; `error` is why this launcher fails."""
        ...


class Quit(Exception):
    """A launcher ends while no process runs, with this exit code; `asked` for it by a signal or not."""

    def __init__(self, code: int, *, asked: bool = False):
        self.code, self.asked = code, asked


def wait_for(inbox: Inbox, until: float | None, hear: Callable[[Any], None]) -> bool:
    """Wait for one event, and hear it. False where none came before `until`. Raises: Quit; a signal came."""
    event = inbox.next(until)
    if isinstance(event, signal.Signals):
        say(f"jaxddp launch: {event.name}: nothing runs here; this launcher ends")
        raise Quit(128 + event, asked=True)
    if event is not None:
        hear(event)
    return event is not None


def listen_at(options: Launch) -> socket.socket:
    """A socket at the coordinator's address, or at a free port of the loopback. Raises: InputError."""
    host, port = split_address(options.coordinator) if options.coordinator else (LOOPBACK, 0)
    with about(f"--coordinator {options.coordinator or LOOPBACK}"):
        listener = listen(host, port)
    if options.machines.most > 1 and is_loopback(listener.getsockname()[0]) and not is_loopback(host):
        # Debian's /etc/hosts maps a machine's own name to such an address.
        here = listener.getsockname()[0]
        say(f"jaxddp launch: {host} is {here} here, where no other machine reaches it: give its IP")
    return listener


def name_of(options: Launch) -> str:
    """The run id, which all machines derive alike."""
    return options.run_id or hashlib.sha256(str(options.coordinator).encode()).hexdigest()[:16]


def job_of_launchers(options: Launch, key: str) -> Job:
    """In which a process is a machine's launcher; by its run id it is told from the job of their processes."""
    assert options.coordinator is not None and options.nr is not None
    run_id = f"{name_of(options)}/launchers"
    return Job(options.coordinator, options.machines.most, options.nr, run_id=run_id, sources=(KEY,), key=key)


def facts_of(options: Launch, processes: int) -> dict[str, str]:
    """What all launchers must be told alike."""
    return {"--nodes": options.nodes, "the number of processes (--processes or --gpus)": str(processes)}
