"""The messages that the processes of a job send to each other after the handshake."""

from dataclasses import dataclass, field

from jaxddp.core.phases import OUTSIDE
from jaxddp.wire.codec import Codec, Elapsed, ExitCode, Number, Shown
from jaxddp.wire.handshake import HANDSHAKE


@dataclass(frozen=True)
class Alive:
    """A heartbeat: the progress of the process, and the seconds that it has spent in each phase.

    See `jaxddp.core.phases`.
    """

    phase: Shown = OUTSIDE
    step: Number = 0
    idle: Elapsed = 0.0
    spent: dict[str, Elapsed] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """A process is done. It ends when all processes are done."""


@dataclass(frozen=True)
class Left:
    """A process closes its connection cleanly, so this is not a loss."""


@dataclass(frozen=True)
class Lost:
    """A process ended before the job did, or made no progress; all others end with its exit code.

    `stacks` selects the processes that write the stacks of their threads first: "none", "own" (the lost one), or "all".
    """

    process: Number
    reason: Shown
    code: ExitCode
    stacks: str = "none"


@dataclass(frozen=True)
class Value:
    """The text that a process contributes to the exchange with this number."""

    number: Number
    name: str
    text: str


@dataclass(frozen=True)
class Reply:
    """Process 0's result of an exchange, or the error that it raised, as JSON, with the exit code of the error."""

    number: Number
    name: str
    text: str
    error: str = ""
    code: ExitCode = 2


Message = Alive | Done | Left | Lost | Value | Reply
CODEC = Codec(*HANDSHAKE, Alive, Done, Left, Lost, Value, Reply)
