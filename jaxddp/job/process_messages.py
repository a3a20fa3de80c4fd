"""The messages that the processes of a job send to each other after the handshake."""

from dataclasses import dataclass, field

from jaxddp.core.phases import OUTSIDE
from jaxddp.wire.codec import Codec, Elapsed, ExitCode, Number, Shown
from jaxddp.wire.handshake import HANDSHAKE


@dataclass(frozen=True)
class Alive:
    """A heartbeat, with the progress of the sender and its seconds in each phase; see `jaxddp.core.phases`."""

    phase: Shown = OUTSIDE
    step: Number = 0
    idle: Elapsed = 0.0
    spent: dict[str, Elapsed] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """The sender is done. It ends when all processes are done."""


@dataclass(frozen=True)
class Left:
    """The sender closes its connection cleanly, which is not a loss."""


@dataclass(frozen=True)
class Lost:
    """A process ended before the job did, or made no progress. All other processes end with its exit code.

    `stacks` selects the processes that first write the stacks of their threads: "none", "own" (the lost process) or
    "all".
    """

    process: Number
    reason: Shown
    code: ExitCode
    stacks: str = "none"


@dataclass(frozen=True)
class Value:
    """The text of the sender in the exchange with this number."""

    number: Number
    name: str
    text: str


@dataclass(frozen=True)
class Reply:
    """The result of an exchange, which process 0 computes, or its error as JSON and the exit code of the error."""

    number: Number
    name: str
    text: str
    error: str = ""
    code: ExitCode = 2


Message = Alive | Done | Left | Lost | Value | Reply
CODEC = Codec(*HANDSHAKE, Alive, Done, Left, Lost, Value, Reply)
