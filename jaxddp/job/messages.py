"""The messages between processes, and the handshake in which both peers prove that they have the job's key.

A message is a JSON object of a known kind, whose fields are validated. The length of the object, a big-endian number of
4 bytes, precedes the object.

In the handshake, the server sends a challenge, the client answers with a hello, and the server answers with a welcome
or a refusal. A proof is an HMAC-SHA256 over the peer's nonce and other fields, so the key is not sent. Without a key
the proofs are empty, and any process that reaches the server can join.

A port is bound before its number is sent to other processes. Otherwise another program could take the port in the
meantime. JAX's coordinator is an exception, because it takes an address instead of a socket (`free_address`).
"""

import errno
import functools
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from jaxddp.core.errors import InputError, on_screen
from jaxddp.core.ranges import Range, whole

LOOPBACK = "127.0.0.1"
_PORTS = Range(1, 65535)


class NotResolved(InputError):
    """The name of a host has no address, or no address of this machine. A name server may give it one later."""


def split_address(address: str) -> tuple[str, int]:
    """Return ("host0", 1234) for `host0:1234`. Raises InputError if invalid. An IPv6 address must be in brackets."""
    host, colon, port = address.rpartition(":")
    number = whole(port, _PORTS)
    if not (colon and host.strip() and host.isprintable()) or number is None:
        raise InputError("expected HOST:PORT with a port from 1 to 65535, as in host0:1234")
    return host.removeprefix("[").removesuffix("]"), number


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a host's port (0 for a free port), only on the interface of the host's address.

    Raises:
        NotResolved: there is no host of this name, or it is another machine.
        InputError: the port is taken or not permitted, or the host is invalid or is the address of another machine.
    """
    may_change = _is_name(host)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (socket.gaierror, UnicodeError) as error:
        kind = NotResolved if may_change and isinstance(error, socket.gaierror) else InputError
        raise kind(f"there is no host {host!r}; give its name or address") from error
    except OSError as error:
        kind = NotResolved if may_change and error.errno == errno.EADDRNOTAVAIL else InputError
        raise kind(_advice(error, port)) from error


def address_of(socket_: socket.socket) -> str:
    """Return the address of a socket as HOST:PORT. An IPv6 address is in brackets."""
    host, port = socket_.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_address(listener: socket.socket) -> str:
    """Return HOST:PORT for a free port on the interface of a listening socket."""
    with socket.socket(listener.family, socket.SOCK_STREAM) as probe:
        probe.bind((listener.getsockname()[0], 0))
        return address_of(probe)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _is_name(host: str) -> bool:
    """Return whether this is a host name, whose address may change. The last part of an IP address is a number."""
    return re.fullmatch(r"[\w.-]+", host) is not None and not host.removesuffix(".").rpartition(".")[2].isdecimal()


def _advice(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken; choose another, the same on every machine"
    if error.errno == errno.EADDRNOTAVAIL:
        return "not an address of this machine; start process 0 (with a launcher: --nr 0) on the coordinator's machine"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"cannot listen there ({reason}); choose a port above 1023, the same on every machine"


PROTOCOL = "jaxddp-6"
KEY = "JAXDDP_JOB_KEY"
"""The environment variable that holds a job's key."""
LENGTH = 4
_NONCE = functools.partial(secrets.token_hex, 16)
"""Returns a value that is used once, in a proof."""
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


class Malformed(ValueError):
    """The received bytes are not a message of this protocol."""


@dataclass(frozen=True)
class Message:
    """A message: a frozen dataclass whose fields are `str`, `bool`, `dict[str, …]`, or one of the types above."""

    def __init_subclass__(cls) -> None:
        _kinds[cls.__name__] = cls


_kinds = dict[str, type[Message]]()
_types = functools.cache(functools.partial(get_type_hints, include_extras=True))
"""Maps a kind of messages to the types of its fields, by name."""


def encode(message: Message) -> bytes:
    """Return the bytes of a message. The first four bytes are the number of bytes that follow."""
    content = json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()
    return len(content).to_bytes(LENGTH, "big") + content


def decode(content: bytes) -> Message:
    """Return the message in `content`, without its length prefix. Raises Malformed if the message is invalid."""
    try:
        plain = json.loads(content)
        kind = _kinds[plain.pop("kind")]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise Malformed("no message of a known kind") from error
    types = _types(kind)
    if plain.keys() != types.keys() or not all(_is_valid(plain[name], hint) for name, hint in types.items()):
        raise Malformed(f"{kind.__name__} has other fields")
    return kind(**{name: on_screen(plain[name]) if hint == Shown else plain[name] for name, hint in types.items()})


def _is_valid(value: Any, hint: Any) -> bool:
    if hint in (str, Shown):
        # An unpaired surrogate cannot be encoded.
        return isinstance(value, str) and not re.search(r"[\ud800-\udfff]", value)
    if hint is bool:
        return type(value) is bool
    if get_origin(hint) is dict:
        _, inner = get_args(hint)
        return isinstance(value, dict) and all(_is_valid(k, str) and _is_valid(v, inner) for k, v in value.items())
    number, bounds = get_args(hint)
    # `isinstance(True, int)` is true, so the exact type is compared.
    return type(value) is number and value in bounds


@dataclass(frozen=True)
class Challenge(Message):
    """The first message on a connection, sent by the server."""

    nonce: str = field(default_factory=_NONCE)
    protocol: str = PROTOCOL


@dataclass(frozen=True)
class Hello(Message):
    """A client's request to join. `facts` must be equal in all processes."""

    process: Number
    count: ProcessCount
    run_id: str
    host: Shown
    facts: dict[str, str]
    nonce: str = field(default_factory=_NONCE)
    proof: str = ""


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


def proof_of_client(hello: Hello, challenge: Challenge, key: str) -> str:
    """Return the proof that the sender of a hello has the key."""
    return _proof(key, "process", challenge.nonce, hello.nonce, hello.process, hello.count, hello.run_id)


def make_welcome(hello: Hello, key: str, jax_address: str = "") -> Welcome:
    """Return the welcome for the sender of a hello."""
    return Welcome(jax_address, _proof(key, "coordinator", hello.nonce, jax_address))


def _proof(key: str, *parts: str | int) -> str:
    # The repr separates the parts unambiguously.
    return hmac.new(key.encode(), repr(parts).encode(), hashlib.sha256).hexdigest() if key else ""


def is_equal(one: str, other: str) -> bool:
    """Compare two proofs in constant time, so that the time does not reveal a matching prefix."""
    return hmac.compare_digest(one.encode(), other.encode())
