"""The messages between processes, and the handshake in which both peers prove that they have the job's key.

A message is a JSON object of a known kind, whose fields are validated. The length of the object, a big-endian number of
4 bytes, precedes the object.

In the handshake, the server sends a challenge, the client answers with a hello, and the server answers with a welcome
or a refusal. A proof is an HMAC-SHA256 over the peer's nonce and other fields, so the key is not sent. Without a key
the proofs are empty, and any process that reaches the server can join.
"""

import dataclasses
import functools
import hashlib
import hmac
import json
import re
import secrets
import socket
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from jaxddp.core.errors import on_screen
from jaxddp.core.ranges import Range

PROTOCOL = "jaxddp-6"
KEY = "JAXDDP_JOB_KEY"
"""The environment variable that holds a job's key."""
LENGTH = 4
MOST_PROCESSES = 2**24
"""The largest number of processes in a job."""
BACKLOG = 4096
"""The most connections that may wait to be accepted: all processes of a large job may connect at once."""

ProcessCount = Annotated[int, Range(1, MOST_PROCESSES)]
Number = Annotated[int, Range(0, 2**53)]
ExitCode = Annotated[int, Range(0, 255)]
Elapsed = Annotated[float, Range(0, 1e12)]
"""Seconds."""
Shown = Annotated[str, on_screen]
"""A text that is shown to users. Its control characters are escaped when the message is decoded."""


_UNPAIRED = re.compile(r"[\ud800-\udfff]")


class Malformed(ValueError):
    """The received bytes are not a message of this protocol."""


class Message:
    """A message: a frozen dataclass whose fields are `str`, `bool`, `dict[str, …]`, or one of the types above."""

    kinds: ClassVar[dict[str, type["Message"]]] = {}

    def __init_subclass__(cls) -> None:
        Message.kinds[cls.__name__] = cls


def encode(message: Any) -> bytes:
    """Return the bytes of a message. The first four bytes are the number of bytes that follow."""
    content = json.dumps({"kind": type(message).__name__, **dataclasses.asdict(message)}).encode()
    return len(content).to_bytes(LENGTH, "big") + content


def decode(content: bytes) -> Message:
    """Return the message in `content`, without its length prefix. Raises Malformed if the message is invalid."""
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON: {error}") from None
    name = plain.pop("kind", None) if isinstance(plain, dict) else None
    kind = Message.kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise Malformed("unknown kind")
    types = _types(kind)
    if plain.keys() != types.keys():
        raise Malformed(f"{name} has other fields")
    for field_name, hint in types.items():
        if not _is_valid(plain[field_name], hint):
            raise Malformed(f"{name}.{field_name} is not as expected")
        if hint == Shown:
            plain[field_name] = on_screen(plain[field_name])
    return kind(**plain)


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _is_valid(value: Any, hint: Any) -> bool:
    if hint in (str, Shown):
        # An unpaired surrogate cannot be encoded.
        return isinstance(value, str) and not _UNPAIRED.search(value)
    if hint is bool:
        return type(value) is bool
    if typing.get_origin(hint) is dict:
        _, inner = typing.get_args(hint)
        return isinstance(value, dict) and all(
            _is_valid(key, str) and _is_valid(item, inner) for key, item in value.items()
        )
    number, bounds = typing.get_args(hint)
    # `isinstance(True, int)` is true, so the exact type is compared.
    return type(value) is number and value in bounds


@dataclass(frozen=True)
class Identity:
    """The values that a process proves in the handshake.

    Attributes:
        process: the id of this process, from 0. Process 0 is the server.
        count: the number of all processes.
        run_id: distinguishes this job from other jobs at the same address.
        key: the secret that the processes share; empty if they have none.
    """

    process: int
    count: int
    run_id: str = ""
    key: str = field(default="", repr=False)


@dataclass(frozen=True)
class Challenge(Message):
    """The first message on a connection, sent by the server."""

    nonce: str
    protocol: str = PROTOCOL


@dataclass(frozen=True)
class Hello(Message):
    """A client's request to join. `facts` must be equal in all processes."""

    process: Number
    count: ProcessCount
    run_id: str
    host: Shown
    facts: dict[str, str]
    nonce: str
    proof: str


@dataclass(frozen=True)
class Welcome(Message):
    """The client has joined. `jax_address` is the `host:port` of JAX's coordinator, empty between launchers."""

    jax_address: str
    proof: str


@dataclass(frozen=True)
class Refusal(Message):
    """The client cannot join. The client raises the error with this exit code, which is 2 for a mistake of the user."""

    reason: Shown
    code: ExitCode = 2


def make_hello(identity: Identity, challenge: Challenge, facts: Mapping[str, str]) -> Hello:
    """Return the client's answer to a challenge."""
    hello = Hello(identity.process, identity.count, identity.run_id, socket.gethostname(), dict(facts), new_nonce(), "")
    return dataclasses.replace(hello, proof=_proof_of_client(hello, challenge, identity.key))


def is_proven(hello: Hello, challenge: Challenge, key: str) -> bool:
    """Return whether a hello proves that its sender has the key."""
    return _equal(hello.proof, _proof_of_client(hello, challenge, key))


def make_welcome(hello: Hello, key: str, jax_address: str = "") -> Welcome:
    """Return the welcome for the sender of a hello."""
    return Welcome(jax_address, _proof(key, "coordinator", hello.nonce, jax_address))


def is_from_server(message: Welcome, hello: Hello, key: str) -> bool:
    """Return whether a welcome proves that the server has the key."""
    return _equal(message.proof, make_welcome(hello, key, message.jax_address).proof)


def new_nonce() -> str:
    """Return a value that is used once, in a proof."""
    return secrets.token_hex(16)


def _proof_of_client(hello: Hello, challenge: Challenge, key: str) -> str:
    return _proof(key, "process", challenge.nonce, hello.nonce, hello.process, hello.count, hello.run_id)


def _proof(key: str, *parts: str | int) -> str:
    # The repr separates the parts unambiguously.
    return hmac.new(key.encode(), repr(parts).encode(), hashlib.sha256).hexdigest() if key else ""


def _equal(one: str, other: str) -> bool:
    """Compare two proofs in constant time, so that the time does not reveal a matching prefix."""
    return hmac.compare_digest(one.encode(), other.encode())
