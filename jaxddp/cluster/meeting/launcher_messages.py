"""The messages that launchers send to each other after the handshake."""

from dataclasses import dataclass

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
    """All processes of the sender's machine have ended. The other fields are those of `jaxddp.cluster.restarts.End`."""

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
