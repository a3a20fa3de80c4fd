"""How the launcher of another machine than 0 reaches that of machine 0."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from jaxddp.cluster.inbox import Inbox
from jaxddp.cluster.meeting.conversation import SILENCE_SECONDS, Arrived, Gone, converse, leave
from jaxddp.cluster.meeting.notes import Note, packed
from jaxddp.core.errors import InputError, JaxddpError, Unreachable, about
from jaxddp.job.connection import Connection, NotReached, reached
from jaxddp.job.environment import Job
from jaxddp.job.greeting import Greeting
from jaxddp.job.network_thread import NetworkThread

_GREETING_SECONDS = 2 * SILENCE_SECONDS + 10
_HOST = "the launcher of machine 0; give another port, the same on every machine"


@dataclass(frozen=True)
class Unreached:
    """Machine 0's launcher was not reached, or it turned this one away."""

    error: JaxddpError


class Visitor:
    """Reaches machine 0: `Arrived`, `Unreached`, `Heard` and `Gone` of it come into an inbox.

    Args:
        job: of the launchers: a process is a machine's launcher.
        facts: values by name that must be the same for all launchers.
    """

    def __init__(self, job: Job, facts: Mapping[str, str], inbox: Inbox):
        self._job, self._inbox, self._greeting = job, inbox, Greeting(job, facts, _HOST, "machines")
        self._connection: Connection | None = None
        self._network = NetworkThread("jaxddp-launcher")

    def reach(self, seconds: float) -> None:
        """Try to reach machine 0 for so long."""
        self._network.begin(self._visit(seconds))

    def send(self, note: Note) -> None:
        """Send a note; where machine 0 has gone, nothing happens: the inbox says so."""
        self._network.call(self._send, note)

    def close(self, *notes: Note) -> None:
        """Send the last notes, and close."""
        if self._connection is not None:
            self._network.result(leave(self._connection, *notes))
        self._network.close()

    def _send(self, note: Note) -> None:
        if self._connection is not None:
            self._connection.send(packed(note))

    async def _visit(self, seconds: float) -> None:
        try:
            with about(f"--coordinator {self._job.coordinator}"):
                self._connection = connection = await self._connected(seconds)
        except (InputError, Unreachable) as error:
            self._inbox.put(Unreached(error))
            return
        self._inbox.put(Arrived(0, self._job.host))
        try:
            reason = await converse(connection, self._job.process_id, 0, self._job.host, self._inbox.put)
        finally:
            self._connection = None
            await connection.close()
        self._inbox.put(Gone(0, reason))

    async def _connected(self, seconds: float) -> Connection:
        """Raises: Unreachable; nobody is there in time. InputError; it turns this one away, or is no address."""
        try:
            return await reached(self._job.host, self._job.port, time.monotonic() + seconds, self._greet)
        except NotReached as error:
            raise Unreachable(
                f"machine {self._job.process_id} could not reach it in {seconds:g} s ({error}); is the address right, "
                "machine 0 started, with --restarts or --nodes MIN:MAX as here, and the port open?"
            ) from None

    async def _greet(self, connection: Connection) -> Connection:
        """Say who this is; the same connection. Raises: OSError, worth another try; InputError, which is not."""
        async with asyncio.timeout(_GREETING_SECONDS):
            await self._greeting.admitted(connection, await self._greeting.challenged(connection))
        return connection
