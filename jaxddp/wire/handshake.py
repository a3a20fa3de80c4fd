"""The handshake: both peers of a new connection prove that they have the job's key, without sending the key.

The server sends a challenge, the client answers with a hello, and the server answers with a welcome or a refusal. A
proof is an HMAC-SHA256 over the peer's nonce and other fields. Without a key the proofs are empty, and any process that
reaches the server can join.
"""

import hashlib
import hmac
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxddp.wire.codec import ExitCode, Number, ProcessCount, Shown

PROTOCOL = "jaxddp-6"
KEY = "JAXDDP_JOB_KEY"
"""The environment variable that holds a job's key."""


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
class Challenge:
    """The first message on a connection, sent by the server."""

    nonce: str
    protocol: str = PROTOCOL


@dataclass(frozen=True)
class Hello:
    """A client's request to join. `facts` must be equal in all processes."""

    process: Number
    count: ProcessCount
    run_id: str
    host: Shown
    facts: dict[str, str]
    nonce: str
    proof: str


@dataclass(frozen=True)
class Welcome:
    """The client has joined. `jax_address` is the `host:port` of JAX's coordinator, empty between launchers."""

    jax_address: str
    proof: str


@dataclass(frozen=True)
class Refusal:
    """The client cannot join. The client raises the error with this exit code, which is 2 for a mistake of the user."""

    reason: Shown
    code: ExitCode = 2


HANDSHAKE = (Challenge, Hello, Welcome, Refusal)
"""The messages that every protocol includes."""


def new_challenge() -> Challenge:
    """Return a challenge with a new nonce."""
    return Challenge(_nonce())


def make_hello(identity: Identity, challenge: Challenge, facts: Mapping[str, str]) -> Hello:
    """Return the client's answer to a challenge."""
    nonce = _nonce()
    proof = _proof(identity.key, challenge, nonce, identity.process, identity.count, identity.run_id)
    host = socket.gethostname()
    return Hello(identity.process, identity.count, identity.run_id, host, dict(facts), nonce, proof)


def is_proven(hello: Hello, challenge: Challenge, key: str) -> bool:
    """Return whether a hello proves that its sender has the key."""
    proof = _proof(key, challenge, hello.nonce, hello.process, hello.count, hello.run_id)
    return _equal(hello.proof, proof)


def make_welcome(hello: Hello, key: str, jax_address: str = "") -> Welcome:
    """Return the welcome for the sender of a hello."""
    return Welcome(jax_address, _server_proof(key, hello, jax_address))


def is_from_server(message: Welcome, hello: Hello, key: str) -> bool:
    """Return whether a welcome proves that the server has the key."""
    return _equal(message.proof, _server_proof(key, hello, message.jax_address))


def _proof(key: str, challenge: Challenge, nonce: str, process: int, count: int, run_id: str) -> str:
    return _hmac(key, "process", challenge.nonce, nonce, process, count, run_id)


def _server_proof(key: str, hello: Hello, jax_address: str) -> str:
    return _hmac(key, "coordinator", hello.nonce, jax_address)


def _hmac(key: str, *parts: str | int) -> str:
    if not key:
        return ""
    # The repr separates the parts unambiguously.
    return hmac.new(key.encode(), repr(parts).encode(), hashlib.sha256).hexdigest()


def _equal(one: str, other: str) -> bool:
    """Compare two proofs in constant time, so that the time does not reveal a matching prefix."""
    return hmac.compare_digest(one.encode(), other.encode())


def _nonce() -> str:
    return secrets.token_hex(16)
