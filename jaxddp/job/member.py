"""The side of every process but process 0: it joins, and is connected with process 0 alone."""

import asyncio
import time
from collections.abc import Callable, Mapping

from jaxddp.core.errors import InputError, Unreachable
from jaxddp.job.connection import Connection, NotReached, reached
from jaxddp.job.environment import Job
from jaxddp.job.greeting import Greeting
from jaxddp.job.messages import Answer, Challenge, Done, Message
from jaxddp.job.watch import Loss, Waits, Watch

_HOST = "process 0 of a jaxddp job; give another port"


class Member:
    """Of a process that joins. All functions belong to the thread of the event loop.

    Attributes:
        jax_address: of JAX's coordinator; known once all have joined.
        watch: of process 0, once all have joined.
    """

    def __init__(self, job: Job, facts: Mapping[str, str]):
        self._job, self._greeting = job, Greeting(job, facts, _HOST, "processes")
        self._answers = dict[int, asyncio.Future[Answer]]()
        self.jax_address = ""
        self.watch: Watch | None = None

    async def meet(self, timeout: float, waits: Waits, end: Callable[[Loss], None]) -> None:
        """Join, and wait for the others. Raises: InputError, Unreachable; as `jaxddp.job.link.Link.meet`."""
        give_up = time.monotonic() + timeout
        connection, challenge = await self._connect(give_up, timeout)
        try:
            self.jax_address = await self._join(connection, challenge, give_up, timeout)
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        self.watch = Watch(self._job.process_id, {0: connection}, {0: self._job.host}, waits, end)
        self._listening = asyncio.ensure_future(self._listen())
        self._beating = asyncio.ensure_future(self.watch.beat())

    async def answer(self, number: int, name: str, timeout: float) -> Answer:
        """What process 0 says in the exchange of a number.

        Raises:
            Unreachable: nothing in time.
            InputError: it is at another exchange.
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
            raise InputError(f"{name}: process 0 is at {answer.name!r} meanwhile; does it run the same program?")
        return answer

    async def finish(self) -> None:
        """Say that this process ends in order, and wait until all do."""
        assert self.watch is not None
        self._connection.send(Done())
        await self.watch.all_done.wait()

    def tell(self, message: Message) -> list[Connection]:
        """Tell process 0; returns its connection."""
        self._connection.send(message)
        return [self._connection]

    async def _join(self, connection: Connection, challenge: Challenge, give_up: float, timeout: float) -> str:
        """Say who this process is; returns the address of JAX's coordinator. Raises: as `meet`."""
        try:
            # Process 0 has the same timeout, and its reason says more than one here.
            async with asyncio.timeout(max(give_up - time.monotonic(), 0) + 5):
                return await self._greeting.admitted(connection, challenge)
        except TimeoutError:
            raise _unanswered(timeout) from None
        except ConnectionResetError:
            raise Unreachable("process 0 ended before all processes had joined") from None

    def _answer(self, number: int) -> asyncio.Future[Answer]:
        # It may come before it is asked for.
        return self._answers.setdefault(number, asyncio.get_running_loop().create_future())

    async def _connect(self, give_up: float, timeout: float) -> tuple[Connection, Challenge]:
        async def greet(connection: Connection) -> tuple[Connection, Challenge]:
            try:
                async with asyncio.timeout(max(give_up - time.monotonic(), 0)):
                    return connection, await self._greeting.challenged(connection)
            except TimeoutError:
                raise _unanswered(timeout) from None

        try:
            return await reached(self._job.host, self._job.port, give_up, greet)
        except NotReached as error:
            raise Unreachable(
                f"process {self._job.process_id} could not reach it in {timeout:g} s ({error}); is the address right, "
                "process 0 started, and the port open?"
            ) from None

    async def _listen(self) -> None:
        assert self.watch is not None
        async for message in self._connection.messages():
            self.watch.told(0, message)
            if isinstance(message, Answer) and not (answer := self._answer(message.number)).done():
                answer.set_result(message)
        self.watch.broke(0)


def _unanswered(timeout: float) -> Unreachable:
    return Unreachable(f"no answer in {timeout:g} s; is it process 0 of this job?")
