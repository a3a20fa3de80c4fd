"""The side of every process but process 0: it joins, and is connected with process 0 alone."""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping

from jaxddp.errors import InputError, Unreachable
from jaxddp.job.connection import STRANGERS_LONGEST, Connection, NotReached, reached
from jaxddp.job.environment import KEY, Job
from jaxddp.job.handshake import nonce, proof_of_coordinator, proof_of_process, same
from jaxddp.job.messages import (
    PROTOCOL,
    Answer,
    Challenge,
    Done,
    Hello,
    Message,
    Refusal,
    Strange,
    Welcome,
)
from jaxddp.job.rendezvous import turned_away
from jaxddp.job.watch import Loss, Waits, Watch


class Member:
    """Of a process that joins. All functions belong to the thread of the event loop.

    Attributes:
        jax_address: of JAX's coordinator; known once all have joined.
        watch: of process 0, once all have joined.
    """

    def __init__(self, job: Job, facts: Mapping[str, str]):
        self._job, self._facts = job, dict(facts)
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
        """What process 0 says in the exchange of a number. Raises: InputError; nothing in time, or of another one."""
        try:
            async with asyncio.timeout(timeout):
                answer = await self._answer(number)
        except TimeoutError:
            raise InputError(
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
        job, own = self._job, nonce()
        proof = proof_of_process(job, challenge, own)
        connection.send(
            Hello(job.process_id, job.num_processes, job.run_id, socket.gethostname(), self._facts, own, proof)
        )
        # Process 0 has the same timeout, and its reason says more than one here.
        answer = await _said(connection, max(give_up - time.monotonic(), 0) + 5, timeout)
        if answer is None:
            raise Unreachable("process 0 ended before all processes had joined")
        if isinstance(answer, Refusal):
            raise turned_away(answer)
        if not isinstance(answer, Welcome):
            raise InputError(_NOT_OURS)
        if not same(answer.proof, proof_of_coordinator(job.key, own, answer.jax_address)):
            raise InputError(f"{KEY} is another one there; give all processes of a job the same")
        return answer.jax_address

    def _answer(self, number: int) -> asyncio.Future[Answer]:
        # It may come before it is asked for.
        return self._answers.setdefault(number, asyncio.get_running_loop().create_future())

    async def _connect(self, give_up: float, timeout: float) -> tuple[Connection, Challenge]:
        async def greet(connection: Connection) -> tuple[Connection, Challenge]:
            return connection, await _challenge(connection, max(give_up - time.monotonic(), 0), timeout)

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


_NOT_OURS = "what answers there is not process 0 of a jaxddp job; give another port"


async def _challenge(connection: Connection, remaining: float, timeout: float) -> Challenge:
    """The first word of process 0. Raises: InputError; it is another. Unreachable; there is none."""
    said = await _said(connection, remaining, timeout)
    if said is None:
        raise ConnectionResetError("it closed the connection")
    if not isinstance(said, Challenge) or said.protocol != PROTOCOL:
        raise InputError(_NOT_OURS)
    return said


async def _said(connection: Connection, seconds: float, timeout: float) -> Message | None:
    """What process 0 says before all have joined; None where it has gone.

    Raises: Unreachable; nothing. InputError; no message.

    `timeout` is what the user knows of the `seconds` that this waits.
    """
    try:
        async with asyncio.timeout(seconds):
            return await connection.receive(STRANGERS_LONGEST)
    except TimeoutError:
        raise Unreachable(f"no answer in {timeout:g} s; is it process 0 of this job?") from None
    except Strange:
        raise InputError(_NOT_OURS) from None
