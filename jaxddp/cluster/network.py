"""The connections between launchers: the server of machine 0, and the client of every other machine."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxddp.core.errors import InputError, JaxddpError, Unreachable, about
from jaxddp.core.log import say
from jaxddp.job.connection import Admission, Client, Connection, NetworkThread
from jaxddp.job.environment import Job
from jaxddp.job.messages import Hello, Message, Refusal, make_welcome
from jaxddp.job.watchdog import Alive, Left, Timeouts, Watchdog

SILENCE_SECONDS = 10.0
"""A launcher counts as lost after this time without a message."""
_TAKEOVER_SECONDS = SILENCE_SECONDS + 1
"""The time in which the server must detect the loss of an earlier launcher of the same machine."""
_FLUSH_SECONDS, _POLL_SECONDS, _JOIN_SECONDS = 2.0, 0.1, 2 * SILENCE_SECONDS + 10


class Arrived(NamedTuple):
    """The launcher of a machine is connected."""

    host: str


class Disconnected(NamedTuple):
    """The connection to the launcher of a machine has ended."""

    reason: str


class Event(NamedTuple):
    """What happened to a machine: one of the above, a message of its launcher, or the error why it is not reached."""

    machine: int
    content: Message | Arrived | Disconnected | JaxddpError


class Network:
    """The connections to other launchers.

    Args:
        job: the job of the launchers, in which each process is the launcher of a machine.
        report: called in another thread with each event.
    """

    def __init__(self, job: Job, report: Callable[[Event], None]):
        self._job, self._report = job, report
        self._connections = dict[int, Connection]()
        self._thread = NetworkThread("jaxddp-launchers")
        self._server: asyncio.Server | None = None

    def send(self, machine: int, message: Message) -> None:
        """Send a message. If the machine is gone, the message is lost, and `Disconnected` is reported."""
        self._thread.call(lambda: machine in self._connections and self._connections[machine].send(message))

    def close(self, *last: Message) -> None:
        """Send the last messages to all connected launchers, and close all connections."""
        self._thread.result(self._close(last))
        self._thread.close()

    async def _close(self, last: tuple[Message, ...]) -> None:
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(_leave(connection, *last) for connection in self._connections.values()))

    async def _listen(self, machine: int, host: str, connection: Connection) -> None:
        """Report that another launcher is connected, its messages, and its end."""
        # The watchdog checks only heartbeats, because launchers do not train and so cannot stall.
        timeouts, transport = Timeouts(silence=SILENCE_SECONDS), connection.writer.transport
        ends = self._job.process_id, {machine: connection}, {machine: host}
        watchdog = Watchdog(*ends, timeouts, lambda loss: transport.abort())
        self._connections[machine] = connection
        self._report(Event(machine, Arrived(host)))
        try:
            async for message in connection.messages():
                watchdog.receive(machine, message)
                if isinstance(message, Left):
                    break
                if not isinstance(message, Alive):
                    self._report(Event(machine, message))
        finally:
            watchdog.record_disconnection(machine)
            watchdog.close()
            del self._connections[machine]
            loss = watchdog.loss(0)
            self._report(Event(machine, Disconnected(loss.reason if loss else "left")))


class LauncherServer(Network):
    """Admits the launchers of the other machines.

    Args:
        listener: a socket that listens at the coordinator's address. `close` closes it.
        facts: values by name that must be equal for all launchers.
    """

    def __init__(self, listener: socket.socket, job: Job, facts: Mapping[str, str], report: Callable[[Event], None]):
        super().__init__(job, report)
        self._admission = Admission(job, facts, "machine")
        self._server = self._thread.result(self._admission.start_server(listener, self._serve))

    async def _serve(self, connection: Connection, hello: Hello) -> None:
        reason = self._admission.difference(hello) or await self._conflict(hello.process, hello.host)
        if reason is not None:
            say(f"jaxddp launch: refused: {reason}")
            return connection.send(Refusal(reason))
        connection.send(make_welcome(hello, self._job.key))
        await self._listen(hello.process, hello.host, connection)

    async def _conflict(self, machine: int, host: str) -> str | None:
        """Return the reason for the refusal of a launcher of this job; None if it is admitted."""
        if not 0 < machine < self._job.num_processes:
            return f"--nr {machine} on {host}: give each machine its own number, 1 to {self._job.num_processes - 1}"
        # A lost launcher may be started again before its loss is detected.
        deadline = time.monotonic() + _TAKEOVER_SECONDS
        while machine in self._connections:
            if time.monotonic() > deadline:
                return f"--nr {machine} twice: on {host} and on a connected machine; give each machine its own number"
            await asyncio.sleep(_POLL_SECONDS)
        return None


class LauncherClient(Network):
    """Connects to the launcher of machine 0. See `LauncherServer` for the arguments."""

    def __init__(self, job: Job, facts: Mapping[str, str], report: Callable[[Event], None]):
        super().__init__(job, report)
        self._client = Client(job, facts, "machine")

    def reach(self, seconds: float) -> None:
        """Try to connect to machine 0 for this many seconds."""
        self._thread.begin(self._run(seconds))

    async def _run(self, seconds: float) -> None:
        try:
            with about(f"--coordinator {self._job.coordinator}"):
                connection = await self._client.connect(seconds, self._join)
        except (InputError, Unreachable) as error:
            self._report(Event(0, error))
            return
        try:
            await self._listen(0, self._job.host, connection)
        finally:
            await connection.close()

    async def _join(self, connection: Connection) -> Connection:
        async with asyncio.timeout(_JOIN_SECONDS):
            await self._client.join(connection, await self._client.challenge(connection))
        return connection


async def _leave(connection: Connection, *last: Message) -> None:
    """Send the last messages, and close the connection cleanly, in bounded time."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_FLUSH_SECONDS):
            for message in (*last, Left()):
                connection.send(message)
            await connection.close()
