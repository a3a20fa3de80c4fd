"""What the processes of a job tell each other: JSON objects of known kinds, whose fields are checked before their use.

Each travels after its length, 4 bytes of a big-endian number.
"""

import dataclasses
import functools
import json
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any

from jaxddp.core.phases import OUTSIDE
from jaxddp.core.ranges import Range
from jaxddp.core.wording import on_screen

PROTOCOL = "jaxddp-5"
LENGTH = 4
MOST_PROCESSES = 2**24
"""Of a job: what a variable of the environment may say as well."""

Count = Annotated[int, Range(1, MOST_PROCESSES)]
Number = Annotated[int, Range(0, 2**53)]
Code = Annotated[int, Range(0, 255)]
_Seconds = Annotated[float, Range(0, 1e12)]


class Strange(ValueError):
    """What arrived is no message of a job."""


@dataclass(frozen=True)
class Challenge:
    """The first word on a connection, which is process 0's; for `nonce` see `jaxddp.job.handshake`."""

    nonce: str
    protocol: str = PROTOCOL


@dataclass(frozen=True)
class Hello:
    """A process would join. `facts` must be the same in all processes."""

    process: Number
    count: Count
    run_id: str
    host: str
    facts: dict[str, str]
    nonce: str
    proof: str


@dataclass(frozen=True)
class Welcome:
    """All have joined; and the address of JAX's coordinator, `host:port`."""

    jax_address: str
    proof: str


@dataclass(frozen=True)
class Refusal:
    """A process cannot join, or nobody can; and the exit code that follows, which is 2 for a mistake."""

    reason: str
    code: Code = 2


@dataclass(frozen=True)
class Alive:
    """A heartbeat: where the process stands, and the seconds that it has spent in each phase.

    See `jaxddp.core.phases`.
    """

    phase: str = OUTSIDE
    step: Number = 0
    idle: _Seconds = 0.0
    spent: dict[str, _Seconds] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """A process ends in order, once all do."""


@dataclass(frozen=True)
class Left:
    """A process needs the others no more: that its connection ends is no news."""


@dataclass(frozen=True)
class Lost:
    """A process ended before the job did, or stands still; all others end with its code.

    `stacks` says whose threads are shown before the end: "none", those of its "own", or of "all" processes.
    """

    process: Number
    reason: str
    code: Code
    stacks: str = "none"


@dataclass(frozen=True)
class Value:
    """What a process contributes to the exchange of this number."""

    number: Number
    name: str
    text: str


@dataclass(frozen=True)
class Answer:
    """What process 0 makes of the values of all; or why it cannot, and the exit code that follows: 2 for a mistake."""

    number: Number
    name: str
    text: str
    # As `JaxddpError.to_json` says it.
    error: str = ""
    code: Code = 2


Message = Challenge | Hello | Welcome | Refusal | Alive | Done | Left | Lost | Value | Answer
_SHOWN = {"host", "reason", "phase"}
"""Fields that come to a screen."""
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message) -> bytes:
    """A message with its length before it."""
    content = json.dumps({"kind": type(message).__name__, **dataclasses.asdict(message)}).encode()
    return len(content).to_bytes(LENGTH, "big") + content


def decode(content: bytes) -> Message:
    """The message that some bytes are, without its length. Raises: Strange; they are none."""
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Strange(f"no JSON: {error}") from None
    kind = _KINDS.get(plain.pop("kind", None)) if isinstance(plain, dict) and _is_named(plain) else None
    if kind is None:
        raise Strange("of no known kind")
    types = _types(kind)
    if plain.keys() != types.keys():
        raise Strange(f"{kind.__name__} has other fields")
    for name, hint in types.items():
        if not _suits(plain[name], hint):
            raise Strange(f"{kind.__name__}.{name} is not as expected")
    for name in _SHOWN & plain.keys():
        plain[name] = on_screen(plain[name])
    return kind(**plain)


def _is_named(plain: dict[str, Any]) -> bool:
    return isinstance(plain.get("kind"), str)


@functools.cache
def _types(kind: type[Message]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _suits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is Annotated:
        whole, bounds = typing.get_args(hint)
        # True is an int, too.
        return type(value) is whole and value in bounds
    if typing.get_origin(hint) is dict:
        _, inner = typing.get_args(hint)
        return isinstance(value, dict) and all(_is_text(key) and _suits(each, inner) for key, each in value.items())
    return _is_text(value)


def _is_text(value: Any) -> bool:
    """Whether it is text that can be encoded: half of a surrogate pair cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
