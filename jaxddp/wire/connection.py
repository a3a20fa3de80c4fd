"""Connections that carry messages between processes: a server, which admits clients with the job's key, and a client.

One thread serves all connections of a process.
"""

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from jaxddp.core.errors import InputError, Unreachable, error_of, plural, show
from jaxddp.wire.messages import (
    BACKLOG,
    KEY,
    LENGTH,
    PROTOCOL,
    Challenge,
    Hello,
    Identity,
    Malformed,
    Refusal,
    Welcome,
    decode,
    encode,
    is_from_server,
    is_proven,
    make_hello,
    new_nonce,
    split_address,
)

LONGEST_OF_STRANGER, LONGEST = 1 << 16, 1 << 28
"""The maximum number of bytes of a message, before and after the peer has proved that it belongs to the job."""
T = TypeVar("T")
_FLUSH_SECONDS = 2.0
_OTHER_FILES = 1024
_HELLO_SECONDS = 5.0
_MOST_PENDING = 64
_OTHER_KEY = KEY + " differs from that of {0} 0; give all {1} of a job the same key"
_RETRY_SECONDS, _CONNECT_SECONDS = 0.2, 5.0


class Connection:
    """Sends and receives messages. Only the thread of the event loop calls its methods."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    def send(self, message: Any) -> None:
        """Send a message without waiting. If the peer is gone, the message is dropped, and `receive` returns None."""
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    async def receive(self, longest: int = LONGEST) -> Any | None:
        """Return the next message; None if the connection has ended. Raises Malformed if the message is invalid."""
        try:
            length = int.from_bytes(await self.reader.readexactly(LENGTH), "big")
            if length > longest:
                raise Malformed(f"{length} bytes")
            return decode(await self.reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError):
            return None

    async def messages(self) -> AsyncIterator[Any]:
        """Yield all messages until the connection ends. A malformed message also ends the iteration."""
        with contextlib.suppress(Malformed):
            while (message := await self.receive()) is not None:
                yield message

    async def close(self) -> None:
        """Send the buffered messages, and close the connection."""
        with contextlib.suppress(OSError):
            self.writer.close()
            await self.writer.wait_closed()


class NetworkThread:
    """Runs an event loop in its own thread. Other threads of the process call these methods."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def result(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run a coroutine, and return its result. Raises TimeoutError if it takes longer than `seconds`."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine without waiting for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the event loop, without waiting for it."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel all coroutines, which close their connections, and end the thread."""
        with contextlib.suppress(TimeoutError):
            self.result(_cancel_all(), _FLUSH_SECONDS)
        self.call(self._loop.stop)
        self._thread.join(_FLUSH_SECONDS)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def raise_file_limit(files: int) -> None:
    """Raise the limit of open files of this process for a number of files, as far as the system permits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = files + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < required:
        limit = required if hard == resource.RLIM_INFINITY else min(required, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


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
        self, identity: Identity, facts: Mapping[str, str], noun: str, *, other_run: str, advice: str, expected: int = 0
    ):
        self._identity, self._facts, self._noun = identity, dict(facts), noun
        self._other_run, self._advice = other_run, advice
        self._most_pending, self._pending = _MOST_PENDING + expected, list[asyncio.Task[None]]()
        self.num_strangers = 0

    async def start_server(
        self, listener: socket.socket, serve: Callable[[Connection, Hello], Coroutine[Any, Any, None]]
    ) -> asyncio.Server:
        """Call `serve` for the connection of each client of this job, and close the connection afterwards."""

        async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = Connection(reader, writer)
            try:
                hello = await self._authenticate(connection)
                if hello is not None:
                    await serve(connection, hello)
            except (OSError, asyncio.CancelledError):
                # The peer is gone, or the server closes. Python 3.11 would print the traceback of a cancelled task.
                pass
            finally:
                await connection.close()

        return await asyncio.start_server(serve_and_close, sock=listener, backlog=BACKLOG)

    async def _authenticate(self, connection: Connection) -> Hello | None:
        """Return the hello of a client of this job; None for any other client, which is refused."""
        task = asyncio.current_task()
        assert task is not None
        self._pending.append(task)
        if len(self._pending) > self._most_pending:
            self._pending[0].cancel()
        challenge = Challenge(new_nonce())
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                connection.send(challenge)
                hello = await connection.receive(LONGEST_OF_STRANGER)
        except (Malformed, TimeoutError):
            return None
        finally:
            self._pending.remove(task)
        if not isinstance(hello, Hello):
            return None
        if hello.run_id != self._identity.run_id:
            reason = self._other_run
        elif self._identity.key and not is_proven(hello, challenge, self._identity.key):
            reason = _OTHER_KEY.format(self._noun, plural(2, self._noun))
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


class Client:
    """Joins a job.

    Args:
        coordinator: the `host:port` of the server.
        facts: values by name, which must be equal in the client and the server.
        noun: the noun for a client in messages: "process" or "machine".
        server: the server's description in the error about another program at its address, followed by advice.
        started: what must have been started, in the error about a server that is not reached.
    """

    def __init__(
        self, identity: Identity, coordinator: str, facts: Mapping[str, str], noun: str, *, server: str, started: str
    ):
        self._identity, self._address, self._facts, self._noun = identity, split_address(coordinator), facts, noun
        self._wrong_server, self._started = f"the program at this address is not {server}", started

    async def connect(self, seconds: float, greet: Callable[[Connection], Awaitable[T]]) -> T:
        """Connect to the server, and return the result of `greet` for the connection.

        After an OSError of the connection or of `greet`, this method tries again. Any error of `greet` closes the
        connection.

        Args:
            seconds: how long to try.

        Raises:
            Unreachable: no server was reached in time.
            InputError: the host's name is invalid.
        """
        reason, deadline = "no answer", time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(remaining, _CONNECT_SECONDS)):
                    connection = Connection(*await asyncio.open_connection(*self._address))
                try:
                    return await greet(connection)
                except BaseException:
                    await connection.close()
                    raise
            except socket.gaierror as error:
                reason = f"its name cannot be resolved: {error.strerror}"
            except OSError as error:
                reason = error.strerror or str(error) or reason
            except UnicodeError:
                raise InputError(f"there is no host {self._address[0]!r}; give its name or address") from None
            await asyncio.sleep(min(_RETRY_SECONDS, remaining))
        client = f"{self._noun} {self._identity.process}"
        advice = f"is the address right, {self._started}, and the port open?"
        raise Unreachable(f"{client} could not reach it in {seconds:g} s ({reason})", advice=advice)

    async def challenge(self, connection: Connection) -> Challenge:
        """Return the server's first message.

        Raises:
            ConnectionResetError: the server closed the connection.
            InputError: the server uses another protocol.
        """
        challenge = await self._receive(connection)
        if not isinstance(challenge, Challenge) or challenge.protocol != PROTOCOL:
            raise InputError(self._wrong_server)
        return challenge

    async def join(self, connection: Connection, challenge: Challenge) -> str:
        """Answer the challenge, and return the address of JAX's coordinator once this client has joined.

        Raises:
            ConnectionResetError: the server closed the connection.
            InputError, Unreachable: the server refused this client, for the reason in the message.
            InputError: the server has another key.
        """
        own_hello = make_hello(self._identity, challenge, self._facts)
        connection.send(own_hello)
        answer = await self._receive(connection)
        if isinstance(answer, Refusal):
            raise error_of(answer.code, answer.reason)
        if not isinstance(answer, Welcome):
            raise InputError(self._wrong_server)
        if not is_from_server(answer, own_hello, self._identity.key):
            raise InputError(_OTHER_KEY.format(self._noun, plural(2, self._noun)))
        return answer.jax_address

    async def _receive(self, connection: Connection) -> Any:
        try:
            message = await connection.receive(LONGEST_OF_STRANGER)
        except Malformed:
            raise InputError(self._wrong_server) from None
        if message is None:
            raise ConnectionResetError("it closed the connection")
        return message
