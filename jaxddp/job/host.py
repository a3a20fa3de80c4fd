"""Process 0's side of a job: it lets the others in, watches them, and brings their values together."""

import asyncio
import os
import resource
import socket
from collections.abc import Callable, Mapping

from jaxddp.core.errors import InputError, Unreachable, error_of
from jaxddp.job.connection import Connection, serving
from jaxddp.job.environment import Job
from jaxddp.job.handshake import proof_of_coordinator
from jaxddp.job.messages import (
    Challenge,
    Done,
    Hello,
    Message,
    Refusal,
    Value,
    Welcome,
)
from jaxddp.job.ports import WAITING, free_address, inherited, listen
from jaxddp.job.rendezvous import Roll
from jaxddp.job.strangers import Strangers
from jaxddp.job.variables import look
from jaxddp.job.watch import Loss, Waits, Watch

INHERITED_SOCKET = "JAXDDP_COORDINATOR_FD"
"""The variable with which a launcher passes on a listening socket, so that no other program takes its port."""


class Host:
    """Of process 0. All functions belong to the thread of the event loop.

    Attributes:
        jax_address: of JAX's coordinator, on the interface of this one; known once all have joined.
        watch: of the others, once all have joined.
    """

    def __init__(self, job: Job, facts: Mapping[str, str]):
        self._job, self._roll = job, Roll(job, facts, socket.gethostname())
        self._members = dict[int, tuple[Connection, Hello]]()
        self._decided = asyncio.Event()
        self._problem: Refusal | None = None
        self._strangers = Strangers(job.num_processes)
        self._values = dict[int, dict[int, Value]]()
        self._arrived = asyncio.Condition()
        self.jax_address = ""
        self.watch: Watch | None = None

    async def meet(self, timeout: float, waits: Waits, end: Callable[[Loss], None]) -> None:
        """Let all in, or tell all why not. Raises: InputError, Unreachable; as `jaxddp.job.link.Link.meet`."""
        _raise_file_limit(self._job.num_processes)
        passed_on = look(os.environ, INHERITED_SOCKET)
        os.environ.pop(INHERITED_SOCKET, None)
        own = listen(self._job.host, self._job.port) if passed_on is None else inherited(passed_on)
        server = await asyncio.start_server(serving(self._serve), sock=own, backlog=WAITING)
        absent = None
        try:
            async with asyncio.timeout(timeout):
                await self._decided.wait()
        except TimeoutError:
            absent = self._roll.absent(timeout, own.getsockname()[0])
            self._problem = Refusal(str(absent), absent.exit_code)
        if self._problem is not None:
            server.close()
            for connection, _ in self._members.values():
                connection.send(self._problem)
            await asyncio.gather(*(connection.close() for connection, _ in self._members.values()))
            raise absent or error_of(self._problem.code, self._problem.reason)
        self.jax_address = free_address(own)
        connections = {process: connection for process, (connection, _) in self._members.items()}
        self.watch = Watch(0, connections, self._roll.hosts, waits, end)
        for connection, hello in self._members.values():
            proof = proof_of_coordinator(self._job.key, hello.nonce, self.jax_address)
            connection.send(Welcome(self.jax_address, proof))
        self._beating = asyncio.ensure_future(self.watch.beat())

    async def gather(self, number: int, name: str, own: str, timeout: float) -> list[str]:
        """The values of all processes, in order of their ids.

        Raises:
            Unreachable: one gives none in time.
            InputError: one is elsewhere.
        """
        there = self._values.setdefault(number, {})
        others = set(range(1, self._job.num_processes))
        try:
            async with asyncio.timeout(timeout), self._arrived:
                await self._arrived.wait_for(lambda: there.keys() >= others)
        except TimeoutError:
            missing = min(others - there.keys())
            raise Unreachable(
                f"{name}: process {missing} gave no value in {timeout:g} s; does it run the same program?"
            ) from None
        del self._values[number]
        for process, value in sorted(there.items()):
            if value.name != name:
                raise InputError(
                    f"{name}: process {process} is at {value.name!r} meanwhile; does it run the same program?"
                )
        return [own, *(there[process].text for process in sorted(others))]

    async def finish(self) -> None:
        """Tell all others once all end in order, and this one too."""
        assert self.watch is not None
        await self.watch.all_done.wait()
        self.tell(Done())

    def tell(self, message: Message) -> list[Connection]:
        """Tell all others; returns their connections."""
        for connection, _ in self._members.values():
            connection.send(message)
        return [connection for connection, _ in self._members.values()]

    async def _serve(self, connection: Connection) -> None:
        """Of a process, or of a stranger, who ends nothing."""
        greeted = await self._strangers.greeted(connection)
        if greeted is not None:
            challenge, hello = greeted
            refusal = self._let_in(challenge, hello, connection)
            if refusal is not None:
                connection.send(refusal)
            else:
                await self._listen(hello.process, connection)

    def _let_in(self, challenge: Challenge, hello: Hello, connection: Connection) -> Refusal | None:
        """Why a process is not let in; None where it is. The first that does not fit ends the meeting."""
        if (refusal := self._roll.stranger(challenge, hello)) is not None:
            return refusal
        if self._decided.is_set():
            if self.watch is not None and self.watch.is_over:
                return self._roll.ending(hello.process)
            return self._problem or self._roll.late(hello.process)
        self._problem = self._roll.mismatch(hello)
        if self._problem is None:
            self._members[hello.process] = connection, hello
            self._roll.hosts[hello.process] = hello.host
        if self._problem is not None or self._roll.is_complete:
            self._decided.set()
        return self._problem

    async def _listen(self, process: int, connection: Connection) -> None:
        async for message in connection.messages():
            if isinstance(message, Value):
                async with self._arrived:
                    self._values.setdefault(message.number, {})[process] = message
                    self._arrived.notify_all()
            if self.watch is not None:
                self.watch.told(process, message)
        if not self._decided.is_set():
            # It may be started again, until all are there.
            del self._members[process], self._roll.hosts[process]
        elif self.watch is not None:
            self.watch.broke(process)


def _raise_file_limit(processes: int) -> None:
    """Each process has a connection here, and one with JAX's coordinator."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * processes + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
