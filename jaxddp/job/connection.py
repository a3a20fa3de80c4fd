"""Connections that carry messages between processes: a server, which admits clients with the job's key, and a client.

One thread serves all connections of a process.
"""

import asyncio
import contextlib
import dataclasses
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import jaxddp.job.messages as messages
from jaxddp.core.errors import InputError, Unreachable, error_of, show
from jaxddp.job.environment import Job
from jaxddp.job.messages import Challenge, Hello, Malformed, Message, Refusal, Welcome, is_equal, proof_of_client

LONGEST_OF_STRANGER, LONGEST = 1 << 16, 1 << 28
"""The maximum number of bytes of a message, before and after the peer has proved that it belongs to the job."""
T = TypeVar("T")
_FLUSH_SECONDS, _HELLO_SECONDS, _RETRY_SECONDS, _CONNECT_SECONDS = 2.0, 5.0, 0.2, 15.0
_OTHER_FILES = 1024
_MOST_PENDING = 64
_OTHER_KEY = messages.KEY + " differs from that of {} 0; give all machines of a job the same key"
_OTHER_JOB = "it serves another job; give each job its own port, and the machines of a job the same options"


class Connection:
    """Sends and receives messages. Only the thread of the event loop calls its methods."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    def send(self, message: Message) -> None:
        """Send a message without waiting. If the peer is gone, the message is dropped, and `receive` returns None."""
        if not self.writer.is_closing():
            self.writer.write(messages.encode(message))

    async def receive(self, longest: int = LONGEST) -> Message | None:
        """Return the next message; None if the connection has ended. Raises Malformed if the message is invalid."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            length = int.from_bytes(await self.reader.readexactly(messages.LENGTH), "big")
            if length > longest:
                raise Malformed(f"{length} bytes")
            return messages.decode(await self.reader.readexactly(length))
        return None

    async def messages(self) -> AsyncIterator[Message]:
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
    """Authenticates the clients of a job.

    Each client has 5 s to send its hello. If too many clients have not sent a hello, the oldest connection is closed.

    Args:
        job: the job of this process. A client and the server must have the same run id and key.
        facts: values by name, which must be equal in the client and the server.
        noun: the noun for a client in messages: "process" or "machine".
        expected: the number of clients that may connect at once, in addition to 64 strangers.

    Attributes:
        num_strangers: the number of clients that were refused because of another run id or key.
    """

    def __init__(self, job: Job, facts: Mapping[str, str], noun: str, expected: int = 0):
        self._job, self._facts, self._noun = job, facts, noun
        self._most_pending, self._pending = _MOST_PENDING + expected, list[Connection]()
        self.num_strangers = 0

    async def start_server(
        self, listener: socket.socket, serve: Callable[[Connection, Hello], Coroutine[Any, Any, None]]
    ) -> asyncio.Server:
        """Call `serve` for the connection of each client of this job, and close the connection afterwards."""

        async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = Connection(reader, writer)
            try:
                # The peer is gone, or the server closes. Python 3.11 would print the traceback of a cancelled task.
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    hello = await self._authenticate(connection)
                    if hello is not None:
                        await serve(connection, hello)
            finally:
                await connection.close()

        return await asyncio.start_server(serve_and_close, sock=listener, backlog=messages.BACKLOG)

    async def _authenticate(self, connection: Connection) -> Hello | None:
        """Return the hello of a client of this job; None for any other client, which is refused."""
        self._pending.append(connection)
        if len(self._pending) > self._most_pending:
            self._pending[0].writer.close()
        challenge = Challenge()
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                connection.send(challenge)
                hello = await connection.receive(LONGEST_OF_STRANGER)
        except (Malformed, TimeoutError):
            return None
        finally:
            self._pending.remove(connection)
        if not isinstance(hello, Hello):
            return None
        if hello.run_id != self._job.run_id:
            reason = _OTHER_JOB
        elif self._job.key and not is_equal(hello.proof, proof_of_client(hello, challenge, self._job.key)):
            reason = _OTHER_KEY.format(self._noun)
        else:
            return hello
        self.num_strangers += 1
        connection.send(Refusal(reason))
        return None

    def difference(self, hello: Hello) -> str | None:
        """Return a line about the first fact that differs between a client and the server; None if all are equal."""
        server, client = f"{self._noun} 0", f"{self._noun} {hello.process} on {hello.host}"
        if hello.proof and not self._job.key:
            return f"{messages.KEY} is set in {client}, and not in {server}; set it in all"
        for name, value in self._facts.items():
            if hello.facts.get(name) != value:
                values = f"{server} has {show(value)}, {client} has {show(hello.facts.get(name))}"
                return f"{name} differs: {values}; it must be the same on every machine"
        return None


class Client:
    """Joins a job. See `Admission` for the arguments."""

    def __init__(self, job: Job, facts: Mapping[str, str], noun: str):
        self._job, self._facts, self._noun = job, facts, noun

    async def connect(self, seconds: float, greet: Callable[[Connection], Awaitable[T]]) -> T:
        """Connect to the server within `seconds`, and return the result of `greet` for the connection.

        After an OSError of the connection or of `greet`, this method tries again. Any error of `greet` closes the
        connection.

        Raises:
            Unreachable: no server was reached in time.
            InputError: the host's name is invalid.
        """
        reason, deadline = "no answer", time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                # A resolver may wait 5 s for a name server. A firewall may drop packets to the first address.
                async with asyncio.timeout(min(remaining, _CONNECT_SECONDS)):
                    address = self._job.host, self._job.port
                    connection = Connection(*await asyncio.open_connection(*address, happy_eyeballs_delay=0.3))
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
                raise InputError(f"there is no host {self._job.host!r}; give its name or address") from None
            await asyncio.sleep(min(_RETRY_SECONDS, remaining))
        problem = f"{self._noun} {self._job.process_id} could not reach it in {seconds:g} s ({reason})"
        advice = f"is the address right, {self._noun} 0 started with the same options, and the port open?"
        raise Unreachable(problem, advice=advice)

    async def challenge(self, connection: Connection) -> Challenge:
        """Return the server's first message.

        Raises:
            ConnectionResetError: the server closed the connection.
            InputError: the server uses another protocol.
        """
        challenge = await self._receive(connection, Challenge)
        if challenge.protocol != messages.PROTOCOL:
            raise self._wrong_server()
        return challenge

    async def join(self, connection: Connection, challenge: Challenge) -> str:
        """Answer the challenge, and return the address of JAX's coordinator once this client has joined.

        Raises:
            ConnectionResetError: the server closed the connection.
            InputError, Unreachable: the server refused this client, for the reason in the message.
            InputError: the server has another key.
        """
        job = self._job
        hello = Hello(job.process_id, job.num_processes, job.run_id, socket.gethostname(), dict(self._facts))
        connection.send(dataclasses.replace(hello, proof=proof_of_client(hello, challenge, job.key)))
        answer = await self._receive(connection, Welcome)
        if not is_equal(answer.proof, messages.make_welcome(hello, job.key, answer.jax_address).proof):
            raise InputError(_OTHER_KEY.format(self._noun))
        return answer.jax_address

    async def _receive(self, connection: Connection, kind: type[T]) -> T:
        try:
            message = await connection.receive(LONGEST_OF_STRANGER)
        except Malformed:
            raise self._wrong_server() from None
        if message is None:
            raise ConnectionResetError("it closed the connection")
        if isinstance(message, Refusal):
            raise error_of(message.code, message.reason)
        if not isinstance(message, kind):
            raise self._wrong_server()
        return message

    def _wrong_server(self) -> InputError:
        advice = "give another port, the same on every machine"
        return InputError(f"the program at this address is not {self._noun} 0 of a job", advice=advice)
