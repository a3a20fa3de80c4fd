"""The connections between launchers: the server of machine 0, and the client of every other machine."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxddp.cluster.meeting.events import Arrived, Disconnected, Event, LauncherMessage, Received, Unreached
from jaxddp.core.errors import InputError, Unreachable, about
from jaxddp.job.environment import Job
from jaxddp.job.watchdog import Left, Lost, Timeouts, Watchdog
from jaxddp.wire.connection import Admission, Client, Connection, NetworkThread, NotReached, start_server
from jaxddp.wire.messages import Hello, Refusal, make_welcome

SILENCE_SECONDS = 10.0
"""A launcher counts as lost after this time without a message."""
_TAKEOVER_SECONDS = SILENCE_SECONDS + 1
"""The time in which the server must detect the loss of an earlier launcher of the same machine."""
_FLUSH_SECONDS = 2.0
_JOIN_SECONDS = 2 * SILENCE_SECONDS + 10

Report = Callable[[Event], None]


class LauncherServer:
    """Admits the launchers of the other machines. It reports `Arrived`, `Received` and `Disconnected`.

    Args:
        listener: a socket that listens at the coordinator's address. `close` closes it.
        job: the job of the launchers, in which each process is the launcher of a machine.
        facts: values by name that must be equal for all launchers.
    """

    def __init__(self, listener: socket.socket, job: Job, facts: Mapping[str, str], report: Report):
        self._job, self._report = job, report
        other_run = (
            "this address is used by the launchers of another job; give each job its own port, and start all machines "
            "of a job with the same --restarts and --nodes"
        )
        advice = "give all machines the same value"
        self._admission = Admission(job.identity, facts, "machine", other_run=other_run, advice=advice)
        self._clients = dict[int, _LauncherConnection]()
        self._thread = NetworkThread("jaxddp-launchers")
        self._thread.result(self._open(listener))

    def send(self, machine: int, message: LauncherMessage) -> None:
        """Send a message. If the machine is gone, the message is lost, and `Disconnected` is reported."""
        self._thread.call(self._send, machine, message)

    def close(self, *last: LauncherMessage) -> None:
        """Send the last messages to all launchers, and close all connections."""
        self._thread.result(self._close(last))
        self._thread.close()

    async def _open(self, listener: socket.socket) -> None:
        self._server = await start_server(listener, self._serve)

    async def _close(self, last: tuple[LauncherMessage, ...]) -> None:
        self._server.close()
        await asyncio.gather(*(_leave(client.connection, *last) for client in self._clients.values()))

    def _send(self, machine: int, message: LauncherMessage) -> None:
        if machine in self._clients:
            self._clients[machine].connection.send(message)

    async def _serve(self, connection: Connection) -> None:
        """Serve one connection of a launcher, or refuse a client of another job."""
        hello = await self._admission.authenticate(connection)
        if hello is None:
            return
        reason = self._admission.difference(hello) or await self._conflict(hello)
        if reason is not None:
            connection.send(Refusal(reason))
            return
        machine = hello.process
        self._clients[machine] = client = _LauncherConnection(connection, hello.host, asyncio.Event())
        connection.send(make_welcome(hello, self._job.key))
        self._report(Arrived(machine, hello.host))
        reason = "was lost"
        try:
            reason = await _listen(connection, 0, machine, hello.host, self._report)
        finally:
            del self._clients[machine]
            client.closed.set()
            self._report(Disconnected(machine, reason))

    async def _conflict(self, hello: Hello) -> str | None:
        """Return the reason for the refusal of a launcher of this job; None if it is admitted."""
        machine, host = hello.process, hello.host
        if machine in self._clients:
            # A lost launcher may be started again before its loss is detected.
            client = self._clients[machine]
            try:
                async with asyncio.timeout(_TAKEOVER_SECONDS):
                    await client.closed.wait()
            except TimeoutError:
                return f"--nr {machine} twice: on {client.host} and on {host}; give each machine its own number"
        if not 0 < machine < self._job.num_processes or machine in self._clients:
            return f"--nr {machine} on {host}: give each machine its own number, 1 to {self._job.num_processes - 1}"
        return None


class LauncherClient:
    """Connects to the launcher of machine 0. It reports `Arrived`, `Unreached`, `Received` and `Disconnected`.

    Args:
        job: the job of the launchers, in which each process is the launcher of a machine.
        facts: values by name that must be equal for all launchers.
    """

    def __init__(self, job: Job, facts: Mapping[str, str], report: Report):
        server = "the launcher of machine 0; give another port, the same on every machine"
        self._job, self._report = job, report
        self._client = Client(job.identity, facts, noun="machine", server=server)
        self._connection: Connection | None = None
        self._thread = NetworkThread("jaxddp-launcher")

    def send(self, machine: int, message: LauncherMessage) -> None:
        """Send a message to machine 0. If it is gone, the message is lost, and `Disconnected` is reported."""
        self._thread.call(self._send, message)

    def reach(self, seconds: float) -> None:
        """Try to connect to machine 0 for this many seconds."""
        self._thread.begin(self._run(seconds))

    def close(self, *last: LauncherMessage) -> None:
        """Send the last messages to machine 0, and close the connection."""
        if self._connection is not None:
            self._thread.result(_leave(self._connection, *last))
        self._thread.close()

    def _send(self, message: LauncherMessage) -> None:
        if self._connection is not None:
            self._connection.send(message)

    async def _run(self, seconds: float) -> None:
        try:
            with about(f"--coordinator {self._job.coordinator}"):
                self._connection = connection = await self._connect(seconds)
        except (InputError, Unreachable) as error:
            self._report(Unreached(error))
            return
        self._report(Arrived(0, self._job.host))
        try:
            reason = await _listen(connection, self._job.process_id, 0, self._job.host, self._report)
        finally:
            self._connection = None
            await connection.close()
        self._report(Disconnected(0, reason))

    async def _connect(self, seconds: float) -> Connection:
        """Connect to machine 0, and join.

        Raises:
            Unreachable: no server is reached in time.
            InputError: the server refuses this launcher.
        """
        try:
            return await self._client.connect(self._job.host, self._job.port, time.monotonic() + seconds, self._join)
        except NotReached as error:
            raise Unreachable(
                f"machine {self._job.process_id} could not reach it in {seconds:g} s ({error}); is the address right, "
                "was machine 0 started with the same --restarts and --nodes, and is the port open?"
            ) from None

    async def _join(self, connection: Connection) -> Connection:
        async with asyncio.timeout(_JOIN_SECONDS):
            await self._client.join(connection, await self._client.challenge(connection))
        return connection


class _LauncherConnection(NamedTuple):
    connection: Connection
    host: str
    closed: asyncio.Event


async def _listen(connection: Connection, own: int, machine: int, host: str, report: Report) -> str:
    """Report the messages of another launcher until its connection ends, and return the reason for the end."""
    losses: list[Lost] = []

    def end(loss: Lost) -> None:
        losses.append(loss)
        connection.writer.transport.abort()

    # The watchdog checks only heartbeats, because launchers do not train and so cannot stall.
    watchdog = Watchdog(own, {machine: connection}, {machine: host}, Timeouts(SILENCE_SECONDS), end)
    beating = asyncio.ensure_future(watchdog.beat())
    try:
        async for message in connection.messages():
            watchdog.receive(machine, message)
            if isinstance(message, Left):
                return "left"
            if isinstance(message, LauncherMessage):
                report(Received(machine, message))
    finally:
        watchdog.record_disconnection(machine)
        watchdog.close()
        beating.cancel()
    return losses[0].reason


async def _leave(connection: Connection, *last: LauncherMessage) -> None:
    """Send the last messages, and close the connection cleanly, in bounded time."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_FLUSH_SECONDS):
            for message in (*last, Left()):
                connection.send(message)
            await connection.writer.drain()
            await connection.close()
