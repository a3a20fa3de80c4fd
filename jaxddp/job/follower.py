"""The followers of a job: all processes except process 0. A follower is connected only to process 0."""

import asyncio
import time
from collections.abc import Callable, Mapping

from jaxddp.core.errors import InputError, Unreachable
from jaxddp.job.environment import Job
from jaxddp.job.process_messages import CODEC, Done, Message, Reply
from jaxddp.job.watchdog import Loss, Timeouts, Watchdog
from jaxddp.wire.client import Client, NotReached
from jaxddp.wire.connection import Connection
from jaxddp.wire.handshake import Challenge

_ANSWER_SECONDS = 5.0
"""Additional seconds that a follower waits after its timeout. Process 0 has the same timeout, and its error names the
absent process."""


class Follower:
    """A follower in its own process. Only the thread of the event loop calls the methods.

    Attributes:
        jax_address: the address of JAX's coordinator; set when all processes have joined.
        watchdog: watches process 0; set when all processes have joined.
    """

    def __init__(self, job: Job, facts: Mapping[str, str]):
        server = "process 0 of a jaxddp job; give another port"
        self._job, self._client = job, Client(job.identity, facts, CODEC, noun="process", server=server)
        self._answers = dict[int, asyncio.Future[Reply]]()
        self.jax_address = ""
        self.watchdog: Watchdog | None = None

    async def meet(self, timeout: float, timeouts: Timeouts, end: Callable[[Loss], None]) -> None:
        """Join the job, and wait until all other processes have joined.

        Raises:
            InputError, Unreachable: see `jaxddp.job.control_plane.ControlPlane.join`.
        """
        deadline = time.monotonic() + timeout
        connection, challenge = await self._connect(deadline, timeout)
        try:
            self.jax_address = await self._join(connection, challenge, deadline, timeout)
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        self.watchdog = Watchdog(self._job.process_id, {0: connection}, {0: self._job.host}, timeouts, end)
        self._listening = asyncio.ensure_future(self._listen())
        self._beating = asyncio.ensure_future(self.watchdog.beat())

    async def answer(self, number: int, name: str, timeout: float) -> Reply:
        """Return the reply of process 0 in the exchange with this number.

        Raises:
            Unreachable: process 0 sends no reply in time.
            InputError: the exchange has another name in process 0.
        """
        try:
            async with asyncio.timeout(timeout):
                answer = await self._answer(number)
        except TimeoutError:
            raise Unreachable(
                f"{name}: process 0 gave no answer in {timeout:g} s; does it run the same program?"
            ) from None
        finally:
            self._answers.pop(number, None)
        if answer.name != name:
            raise InputError(f"{name}: process 0 is at {answer.name!r} instead; does it run the same program?")
        return answer

    async def finish(self) -> None:
        """Notify process 0 that this process is done, and wait until all processes are done."""
        assert self.watchdog is not None
        self._connection.send(Done())
        await self.watchdog.all_done.wait()

    def send(self, message: Message) -> list[Connection]:
        """Send a message to process 0, and return its connection."""
        self._connection.send(message)
        return [self._connection]

    async def _connect(self, deadline: float, timeout: float) -> tuple[Connection, Challenge]:
        async def greet(connection: Connection) -> tuple[Connection, Challenge]:
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                    return connection, await self._client.challenge(connection)
            except TimeoutError:
                raise _unanswered(timeout) from None

        try:
            return await self._client.connect(self._job.host, self._job.port, deadline, greet)
        except NotReached as error:
            raise Unreachable(
                f"process {self._job.process_id} could not reach it in {timeout:g} s ({error}); is the address right, "
                "process 0 started, and the port open?"
            ) from None

    async def _join(self, connection: Connection, challenge: Challenge, deadline: float, timeout: float) -> str:
        """Join the job, and return the address of JAX's coordinator. Raises the same errors as `meet`."""
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0) + _ANSWER_SECONDS):
                return await self._client.join(connection, challenge)
        except TimeoutError:
            raise _unanswered(timeout) from None
        except ConnectionResetError:
            raise Unreachable("process 0 ended before all processes had joined") from None

    def _answer(self, number: int) -> asyncio.Future[Reply]:
        # The reply may arrive before this process waits for it.
        return self._answers.setdefault(number, asyncio.get_running_loop().create_future())

    async def _listen(self) -> None:
        assert self.watchdog is not None
        async for message in self._connection.messages():
            self.watchdog.receive(0, message)
            if isinstance(message, Reply) and not (answer := self._answer(message.number)).done():
                answer.set_result(message)
        self.watchdog.record_disconnection(0)


def _unanswered(timeout: float) -> Unreachable:
    return Unreachable(f"no answer in {timeout:g} s; is it process 0 of this job?")
