"""The leader of a job, which is process 0. It admits and watches the other processes, and gathers their values."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping

from jaxddp.core.errors import InputError, Unreachable, error_of
from jaxddp.job.env_variables import lookup
from jaxddp.job.environment import Job
from jaxddp.job.ports import free_address, inherited_socket, listen_once_resolved
from jaxddp.job.process_messages import CODEC, Done, Message, Value
from jaxddp.job.roster import Roster
from jaxddp.job.watchdog import Loss, Timeouts, Watchdog
from jaxddp.wire.admission import Admission, start_server
from jaxddp.wire.connection import Connection
from jaxddp.wire.file_limit import raise_file_limit
from jaxddp.wire.handshake import Hello, Refusal, make_welcome

INHERITED_SOCKET = "JAXDDP_COORDINATOR_FD"
"""The environment variable with the file descriptor of the socket that the launcher already listens on."""


class Leader:
    """Process 0, connected to all others. Only the thread of the event loop calls the methods.

    Attributes:
        jax_address: the address of JAX's coordinator, on the interface of this server; set when all have joined.
        watchdog: watches the other processes; set when all have joined.
    """

    def __init__(self, job: Job, facts: Mapping[str, str]):
        self._job, self._roster = job, Roster(job.num_processes, socket.gethostname())
        self._admission = Admission(
            job.identity,
            facts,
            "process",
            other_run="it serves another job; give each job its own port",
            advice="install the same version on every host",
            expected=job.num_processes,
        )
        self._followers = dict[int, tuple[Connection, Hello]]()
        self._is_decided = asyncio.Event()
        self._problem: Refusal | None = None
        self._values = dict[int, dict[int, Value]]()
        self._values_changed = asyncio.Condition()
        self.jax_address = ""
        self.watchdog: Watchdog | None = None

    async def meet(self, timeout: float, timeouts: Timeouts, end: Callable[[Loss], None]) -> None:
        """Admit all processes, or send each process the reason why the job cannot start.

        Raises:
            InputError, Unreachable: see `jaxddp.job.control_plane.ControlPlane.join`.
        """
        # Each process has a connection to this server and one to JAX's coordinator.
        raise_file_limit(2 * self._job.num_processes)
        descriptor = lookup(os.environ, INHERITED_SOCKET)
        os.environ.pop(INHERITED_SOCKET, None)
        deadline = time.monotonic() + timeout
        if descriptor is None:
            listener = await listen_once_resolved(self._job.host, self._job.port, deadline)
        else:
            listener = inherited_socket(descriptor)
        server = await start_server(listener, CODEC, self._serve)
        timeout_error = None
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                await self._is_decided.wait()
        except TimeoutError:
            timeout_error = self._roster.absence_error(
                timeout, listener.getsockname()[0], self._admission.num_strangers
            )
            self._problem = Refusal(str(timeout_error), timeout_error.exit_code)
        if self._problem is not None:
            server.close()
            for connection in self._connections():
                connection.send(self._problem)
            await asyncio.gather(*(connection.close() for connection in self._connections()))
            raise timeout_error or error_of(self._problem.code, self._problem.reason)
        self.jax_address = free_address(listener)
        connections = {process: connection for process, (connection, _) in self._followers.items()}
        self.watchdog = Watchdog(0, connections, self._roster.hosts, timeouts, end)
        for connection, hello in self._followers.values():
            connection.send(make_welcome(hello, self._job.key, self.jax_address))
        self._beating = asyncio.ensure_future(self.watchdog.beat())

    async def gather(self, number: int, name: str, own_text: str, timeout: float) -> list[str]:
        """Return the values of all processes, in the order of their ids.

        Raises:
            Unreachable: a process sends no value in time.
            InputError: a process makes an exchange with another name.
        """
        values = self._values.setdefault(number, {})
        others = set(range(1, self._job.num_processes))
        try:
            async with asyncio.timeout(timeout), self._values_changed:
                await self._values_changed.wait_for(lambda: values.keys() >= others)
        except TimeoutError:
            missing = min(others - values.keys())
            raise Unreachable(
                f"{name}: process {missing} gave no value in {timeout:g} s; does it run the same program?"
            ) from None
        del self._values[number]
        for process, value in sorted(values.items()):
            if value.name != name:
                raise InputError(
                    f"{name}: process {process} is at {value.name!r} instead; does it run the same program?"
                )
        return [own_text, *(values[process].text for process in sorted(others))]

    async def finish(self) -> None:
        """Wait until all others are done, and notify them that this process is done."""
        assert self.watchdog is not None
        await self.watchdog.all_done.wait()
        self.send(Done())

    def send(self, message: Message) -> list[Connection]:
        """Send a message to all others, and return their connections."""
        for connection in self._connections():
            connection.send(message)
        return self._connections()

    def _connections(self) -> list[Connection]:
        return [connection for connection, _ in self._followers.values()]

    async def _serve(self, connection: Connection) -> None:
        """Serve one connection of a process, or refuse a client of another job."""
        hello = await self._admission.authenticate(connection)
        if hello is None:
            return
        refusal = self._admit(hello, connection)
        if refusal is not None:
            connection.send(refusal)
        else:
            await self._listen(hello.process, connection)

    def _admit(self, hello: Hello, connection: Connection) -> Refusal | None:
        """Admit a process and return None, or return the refusal. After a conflict, every process is refused."""
        if self._is_decided.is_set():
            if self.watchdog is not None and self.watchdog.is_over:
                reason = f"process {hello.process} joined again while the job is ending; start it again"
                return Refusal(reason, Unreachable.exit_code)
            return self._problem or Refusal(
                f"all {self._job.num_processes} processes of the job there have joined already; is "
                f"JAX_PROCESS_ID={hello.process} given twice, or is this another job's address?"
            )
        reason = self._roster.conflict(hello) or self._admission.difference(hello)
        if reason is not None:
            self._problem = Refusal(reason)
        else:
            self._followers[hello.process] = connection, hello
            self._roster.hosts[hello.process] = hello.host
        if self._problem is not None or self._roster.is_complete:
            self._is_decided.set()
        return self._problem

    async def _listen(self, process: int, connection: Connection) -> None:
        async for message in connection.messages():
            if isinstance(message, Value):
                async with self._values_changed:
                    self._values.setdefault(message.number, {})[process] = message
                    self._values_changed.notify_all()
            if self.watchdog is not None:
                self.watchdog.receive(process, message)
        if not self._is_decided.is_set():
            # Until all have joined, the process may be started again.
            del self._followers[process], self._roster.hosts[process]
        elif self.watchdog is not None:
            self.watchdog.record_disconnection(process)
