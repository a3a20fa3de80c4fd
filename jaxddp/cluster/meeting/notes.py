"""What launchers tell each other: notes, which travel as the text of a job's `Value`, and are checked before use."""

import dataclasses
import json
import typing
from dataclasses import dataclass

from jaxddp.core.errors import InputError
from jaxddp.job.messages import Code, Count, Number, Strange, Value
from jaxddp.overrides import check_values

_LONGEST_LINE = 2000


@dataclass(frozen=True)
class Assignment:
    """A machine's part in a generation, which is one start of the whole job; they are numbered from 0.

    Attributes:
        first_rank: of its processes.
        processes: of all machines.
        coordinator: `host:port` of the processes, another in each generation.
        run_id: another in each generation, too: a late process of an older one is turned away.
    """

    generation: Number
    first_rank: Number
    processes: Count
    coordinator: str
    run_id: str


@dataclass(frozen=True)
class Stop:
    """A generation ends elsewhere: what still runs of it here is given a moment, or time to save, and ended."""

    generation: Number
    saved: bool


@dataclass(frozen=True)
class Failed:
    """The first process that failed here; the others of this machine may still run."""

    generation: Number
    code: Code
    cause: str


@dataclass(frozen=True)
class Ended:
    """All processes of this machine have ended; the fields are those of `jaxddp.cluster.restarts.End`."""

    generation: Number
    code: Code
    cause: str
    asked: bool
    quits: bool = False


@dataclass(frozen=True)
class Told:
    """A line for the user, on every machine."""

    line: str


@dataclass(frozen=True)
class Over:
    """The job is at its end, with this exit code."""

    code: Code


Note = Assignment | Stop | Failed | Ended | Told | Over
_KINDS: dict[str, type[Note]] = {kind.__name__: kind for kind in typing.get_args(Note)}


def shortened(line: str) -> str:
    """As much of a text as a note may hold, on one line."""
    return " ".join(line.split())[:_LONGEST_LINE] or "no reason is known"


def packed(note: Note) -> Value:
    """A note as it travels."""
    return Value(0, type(note).__name__, json.dumps(dataclasses.asdict(note)))


def unpacked(value: Value) -> Note:
    """The note that a message carries. Raises: Strange; it is none."""
    kind = _KINDS.get(value.name)
    if kind is None:
        raise Strange("a note of no known kind")
    try:
        note = kind(**json.loads(value.text))
        check_values(note)
    except (InputError, TypeError, ValueError, RecursionError) as error:
        raise Strange(f"{kind.__name__}: {error}") from None
    return note
