"""Messages of processes outside a job to its coordinator."""

import contextlib
import json
import socket

from jaxddp.job.control_plane import Value
from jaxddp.job.messages import LENGTH, Hello, Welcome, decode, encode
from jaxddp.job.watchdog import Lost

FACTS = {"Python": "3"}
HELLO = Hello(1, 2, "run", "there", FACTS, "nonce", "")


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(LENGTH, "big") + content


def changed(**fields: object) -> bytes:
    """Return a hello message with changed fields, of any types."""
    plain = json.loads(encode(HELLO)[LENGTH:])
    return framed(json.dumps(plain | fields).encode())


STRANGERS = {
    "a browser": b"GET / HTTP/1.1\r\nHost: there\r\n\r\n",
    "brackets": framed(b"[" * 60_000),
    "an endless message": (2**31).to_bytes(LENGTH, "big") + b"x" * 1000,
    "an unknown kind": framed(b'{"kind": "Shutdown"}'),
    "no fields": framed(b'{"kind": "Hello"}'),
    "a negative process": changed(process=-1),
    "a process of a half": changed(process=1.5),
    "a count of nothing": changed(count=0),
    "facts of numbers": changed(facts={"Python": 3}),
    "half a character": changed(proof="\ud800"),
    "another run": changed(run_id="other"),
    "a loss": encode(Lost(0, "was lost", 1)),
    "a value": encode(Value(0, "digests", "x")),
    "a welcome": encode(Welcome("127.0.0.1:1", "")),
    "half a message": framed(b"{" * 100)[:50],
    "nothing": b"",
}


def answers(connection: socket.socket) -> list[object]:
    """Return the answers of process 0 on a connection until it is closed."""
    with connection, connection.makefile("rb") as stream:
        results = []
        # End the input, so that process 0 does not wait for more.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while head := stream.read(LENGTH):
                results.append(decode(stream.read(int.from_bytes(head, "big"))))
        return results
