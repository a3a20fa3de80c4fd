"""The messages that launchers send to each other after the handshake."""

from dataclasses import dataclass

from jaxddp.job.process_messages import Alive, Left, Lost
from jaxddp.wire.codec import Codec, ExitCode, Number, ProcessCount, Shown
from jaxddp.wire.handshake import HANDSHAKE

_LONGEST_LINE = 2000


@dataclass(frozen=True)
class Assignment:
    """A machine's part in a generation, which is one start of the whole job. Generations are numbered from 0.

    Attributes:
        first_rank: the rank of this machine's first process.
        processes: the number of processes on all machines.
        coordinator: the `host:port` where the processes meet. Each generation has a new one.
        run_id: the id of the generation. A late process of an earlier generation has another id, and cannot join.
    """

    generation: Number
    first_rank: Number
    processes: ProcessCount
    coordinator: str
    run_id: str


@dataclass(frozen=True)
class Stop:
    """Asks a machine to end its processes, because those of another machine ended.

    If `saved`, the processes get time to save first.
    """

    generation: Number
    saved: bool


@dataclass(frozen=True)
class MachineFailed:
    """A process of this machine has failed, as the first one. The other processes may still run."""

    generation: Number
    code: ExitCode
    cause: Shown


@dataclass(frozen=True)
class MachineEnded:
    """All processes of this machine have ended. The fields are those of `jaxddp.cluster.restarts.End`."""

    generation: Number
    code: ExitCode
    cause: Shown
    asked: bool
    quits: bool


@dataclass(frozen=True)
class Notice:
    """A line that every launcher shows to its user."""

    line: Shown


@dataclass(frozen=True)
class JobEnded:
    """The job has ended with this exit code."""

    code: ExitCode


LauncherMessage = Assignment | Stop | MachineFailed | MachineEnded | Notice | JobEnded
CODEC = Codec(*HANDSHAKE, Alive, Left, Lost, Assignment, Stop, MachineFailed, MachineEnded, Notice, JobEnded)


def shortened(text: str) -> str:
    """Return as much of a text as a message may hold, on one line."""
    return " ".join(text.split())[:_LONGEST_LINE] or "no reason is known"
