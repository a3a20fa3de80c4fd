"""The server's side of the handshake. It admits clients that prove the job's key, and refuses others (strangers)."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from jaxddp.core.wording import plural, show
from jaxddp.wire.codec import Codec, Malformed
from jaxddp.wire.connection import LONGEST_OF_STRANGER, Connection
from jaxddp.wire.handshake import KEY, Hello, Identity, Refusal, is_proven, new_challenge

BACKLOG = 4096
"""The most connections that may wait to be accepted: all processes of a large job may connect at once."""
_HELLO_SECONDS = 5.0
_MOST_PENDING = 64


async def start_server(
    listener: socket.socket, codec: Codec, serve: Callable[[Connection], Coroutine[Any, Any, None]]
) -> asyncio.Server:
    """Call `serve` for each connection, and close the connection afterwards."""

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, codec)
        try:
            await serve(connection)
        except (OSError, asyncio.CancelledError):
            # The peer is gone, or the server closes. Python 3.11 would print the traceback of a cancelled task.
            pass
        finally:
            await connection.close()

    return await asyncio.start_server(serve_and_close, sock=listener, backlog=BACKLOG)


class Admission:
    """Authenticates clients.

    Each client has 5 s to send its hello. If too many clients have not sent a hello, the oldest connection is closed.

    Args:
        identity: the server's process id, run id and key. A client must have the same run id and key.
        facts: values by name, which must be equal in the client and the server.
        advice: what to do if the facts differ.
        noun: the noun for a client in messages: "process" or "machine".
        other_run: the reason for the refusal of a client with another run id.
        expected: the number of clients that may connect at once, in addition to 64 strangers.

    Attributes:
        num_strangers: the number of clients that were refused because of another run id or key.
    """

    def __init__(
        self,
        identity: Identity,
        facts: Mapping[str, str],
        noun: str,
        *,
        other_run: str,
        advice: str,
        expected: int = 0,
    ):
        self._identity, self._facts, self._noun = identity, dict(facts), noun
        self._other_run, self._advice = other_run, advice
        self._most_pending, self._pending = _MOST_PENDING + expected, dict[asyncio.Task[None], None]()
        self.num_strangers = 0

    async def authenticate(self, connection: Connection) -> Hello | None:
        """Return the hello of a client of this job; None for any other client, which is refused."""
        task = asyncio.current_task()
        assert task is not None
        self._pending[task] = None
        if len(self._pending) > self._most_pending:
            next(iter(self._pending)).cancel()
        challenge = new_challenge()
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                connection.send(challenge)
                hello = await connection.receive(LONGEST_OF_STRANGER)
        except (Malformed, TimeoutError):
            return None
        finally:
            self._pending.pop(task, None)
        if not isinstance(hello, Hello):
            return None
        if hello.run_id != self._identity.run_id:
            reason = self._other_run
        elif self._identity.key and not is_proven(hello, challenge, self._identity.key):
            reason = other_key(self._noun)
        else:
            return hello
        self.num_strangers += 1
        connection.send(Refusal(reason))
        return None

    def difference(self, hello: Hello) -> str | None:
        """Return a line about the first fact that differs between a client and the server; None if all are equal."""
        client = f"{self._noun} {hello.process} on {hello.host}"
        if hello.proof and not self._identity.key:
            return f"{KEY} is set in {client}, and not in {self._noun} 0; set it in all"
        for name, value in self._facts.items():
            if hello.facts.get(name) != value:
                other = show(hello.facts.get(name))
                values = f"{self._noun} 0 has {show(value)}, {client} has {other}"
                return f"{name} differs: {values}; {self._advice}"
        return None


def other_key(noun: str) -> str:
    """Return the error of a server or client whose peer has another key."""
    return f"{KEY} differs from that of {noun} 0; give all {plural(2, noun)} of a job the same key"
