"""The messages that launchers send to each other, the events that change a launcher's state, and their effects.

The states are `Coordinator` and `Agent`. `state.after(event, now)` is a pure function, which returns the next state and
the effects. `jaxddp.cluster.meeting.driver` collects the events, and performs the effects.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from jaxddp.cluster.worker_group import End
from jaxddp.core.errors import JaxddpError
from jaxddp.wire.messages import ExitCode, Message, Number, ProcessCount, Shown

_LONGEST_LINE = 2000


class LauncherMessage(Message):
    """A message from one launcher to another."""


@dataclass(frozen=True)
class Assignment(LauncherMessage):
    """The processes of a machine in a generation. A generation is one start of the whole job, numbered from 0.

    Attributes:
        first_rank: the rank of this machine's first process.
        processes: the number of processes on all machines.
        coordinator: the `host:port` of the coordinator, which differs between generations.
        run_id: the id of the generation. A late process of an earlier generation has another id, and cannot join.
    """

    generation: Number
    first_rank: Number
    processes: ProcessCount
    coordinator: str
    run_id: str


@dataclass(frozen=True)
class Stop(LauncherMessage):
    """A request to end the processes of a machine, because the processes of another machine ended.

    If `saved`, the other machine's processes have saved, so these processes have time to save first.
    """

    generation: Number
    saved: bool


@dataclass(frozen=True)
class MachineFailed(LauncherMessage):
    """The first process of the sender's machine has failed. The other processes may still run."""

    generation: Number
    code: ExitCode
    cause: Shown


@dataclass(frozen=True)
class MachineEnded(LauncherMessage):
    """All processes of the sender's machine have ended; see `jaxddp.cluster.worker_group.End`."""

    generation: Number
    code: ExitCode
    cause: Shown
    stop_requested: bool
    user_exit: bool


@dataclass(frozen=True)
class Notice(LauncherMessage):
    """A line that every launcher prints."""

    line: Shown


@dataclass(frozen=True)
class JobEnded(LauncherMessage):
    """The job has ended with this exit code."""

    code: ExitCode


def shortened(text: str) -> str:
    """Return a text on one line, cut to the maximum length in a message."""
    return " ".join(text.split())[:_LONGEST_LINE] or "no reason is known"


@dataclass(frozen=True)
class Arrived:
    """The launcher of a machine is connected."""

    machine: int
    host: str


@dataclass(frozen=True)
class Disconnected:
    """The connection to the launcher of a machine has ended."""

    machine: int
    reason: str


@dataclass(frozen=True)
class Unreached:
    """Machine 0 was not reached in time, or it refused this machine."""

    error: JaxddpError


@dataclass(frozen=True)
class Received:
    """The launcher of a machine sent a message."""

    machine: int
    message: LauncherMessage


@dataclass(frozen=True)
class LocalFailed:
    """The first process of this machine has failed. The other processes may still run."""

    end: End


@dataclass(frozen=True)
class LocalEnded:
    """All processes of this machine have ended."""

    end: End


@dataclass(frozen=True)
class Signalled:
    """The launcher received a signal while no process ran on this machine."""

    number: signal.Signals


@dataclass(frozen=True)
class TimePassed:
    """The launcher starts, or the time `State.wake` is reached."""


Event = Arrived | Disconnected | Unreached | Received | LocalFailed | LocalEnded | Signalled | TimePassed


@dataclass(frozen=True)
class Say:
    """Print a line on this machine."""

    line: str


@dataclass(frozen=True)
class Send:
    """Send a message to the launcher of a machine. If that launcher is gone, the message is lost."""

    machine: int
    message: LauncherMessage


@dataclass(frozen=True)
class Reach:
    """Try to connect to machine 0 for this many seconds."""

    seconds: float


@dataclass(frozen=True)
class StartGeneration:
    """Start a generation on these machines, including this machine. The driver adds the coordinator's address."""

    assignments: Mapping[int, Assignment]


@dataclass(frozen=True)
class JoinGeneration:
    """Start the processes that machine 0 has assigned to this machine."""

    assignment: Assignment


@dataclass(frozen=True)
class StopProcesses:
    """End the processes of this machine. If `saved`, they have time to save first."""

    saved: bool


@dataclass(frozen=True)
class SaveProcesses:
    """Ask the processes of this machine to save and stop."""


@dataclass(frozen=True)
class RaiseError:
    """Raise an error, because the job did not start."""

    error: JaxddpError


Effect = Say | Send | Reach | StartGeneration | JoinGeneration | StopProcesses | SaveProcesses | RaiseError


class State(Protocol):
    """A launcher's state. Times are those of the monotonic clock, in seconds."""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended for this machine."""
        ...

    @property
    def code(self) -> int:
        """The exit code of the job, once it is over."""
        ...

    @property
    def wake(self) -> float | None:
        """The time of the next `TimePassed` event; None if the state waits only for other events."""
        ...

    def after(self, event: Event, now: float) -> tuple[Self, list[Effect]]:
        """Return the next state, and the effects to perform."""
        ...

    def last_messages(self, error: JaxddpError | None) -> list[LauncherMessage]:
        """Return the messages to send before the connections are closed. `error` ends this launcher, if any."""
        ...
