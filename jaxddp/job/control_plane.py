"""The connections between the processes of a job, over which they exchange values and watch each other.

Process 0, the leader, admits the other processes, the followers. A follower is connected only to process 0. All
processes join before `jax.distributed.initialize`. So a conflict, which would hang or crash JAX, raises a one-line
error. One thread serves all network connections of a process.
"""

import asyncio
import contextlib
import functools
import itertools
import select
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jaxddp.job.messages as messages
from jaxddp.core.errors import InputError, JaxddpError, Key, Unreachable, about, listed, plural
from jaxddp.core.peers import Peers, Spent, T, answer_of, result_of
from jaxddp.core.phases import phase
from jaxddp.core.process_exit import end_now
from jaxddp.job.connection import Admission, Client, Connection, NetworkThread, raise_file_limit
from jaxddp.job.environment import INHERITED_SOCKET, Job, inherited
from jaxddp.job.watchdog import Done, Left, Lost, Timeouts, Watchdog, end_process

_PROXY = Path(__file__).with_name("coordinator_proxy.py")
_PROXY_SECONDS, _FLUSH_SECONDS, _RESOLVE_SECONDS = 10.0, 2.0, 0.2
_ANSWER_SECONDS = 5.0
"""Additional seconds that a follower waits after its timeout. Process 0 has the same timeout, and its error names the
absent process."""
_LONGEST_REASON = 10_000
_SAME_PROGRAM = "does it run the same program?"
_MOST_NAMED = 8


@dataclass(frozen=True)
class Value(messages.Message):
    """The text of the sender in the exchange with this number; from process 0 an answer, see `core.peers.answer_of`."""

    number: messages.Number
    name: str
    text: str


class ControlPlane(Peers):
    """The connection of this process to its job. Any thread may call a method, but only one thread at a time.

    A new object waits until all processes have joined, and compares their facts. Afterwards the processes watch each
    other.

    Args:
        job: this process's place in the job.
        facts: values by name that must be equal in all processes, such as versions.
        timeouts: how long this process waits for the others.
        end: called with the first loss, after this process has sent the loss to the others. By default, `end` ends
            this process.

    Raises:
        InputError: the address is taken or wrong; a process joins twice, belongs to another job, or has a different
            number of processes, key or facts.
        Unreachable: process 0 cannot be reached, or another process does not join in time; or the coordinator's name
            does not resolve to the host of process 0 in time.
    """

    def __init__(
        self, job: Job, facts: Mapping[str, str], timeouts: Timeouts, end: Callable[[Lost], None] = end_process
    ):
        self.process_index, self.process_count, self.longest_wait = job.process_id, job.num_processes, timeouts.longest
        self.timeouts, self._numbers = timeouts, itertools.count()
        self._member = Follower(job, facts) if job.process_id else Leader(job, facts)
        self._network = NetworkThread("jaxddp-job")
        # A variable may be left over from another job.
        origin = f" (from {', '.join(job.sources)})" if job.sources else ""
        try:
            with about(f"coordinator {job.coordinator}{origin}"):
                self.watchdog = self._network.result(self._member.meet(timeouts, end))
        except BaseException:
            self._network.close()
            raise

    @functools.cached_property
    def jax_address(self) -> str:
        """The coordinator's address for `jax.distributed.initialize`. It starts the proxy of a process other than 0."""
        if self.is_first:
            return self._member.jax_address
        # The reference keeps the proxy running as long as this object exists.
        self._proxy, address = _start_proxy(self._member.jax_address)
        return address

    @property
    def own_address(self) -> str:
        """The IP address of this machine on the network of the coordinator."""
        return next(iter(self._member.connections.values())).writer.get_extra_info("sockname")[0]

    def decide(self, name: str, text: str, decide: Callable[[list[str]], T]) -> T:
        """See `Peers.decide`. Raises: InputError if a process makes a call with another name."""
        number = next(self._numbers)
        if not self.is_first:
            self._network.call(self._member.send, Value(number, name, text))
        return self._result(number, name, lambda: decide([text, *(each.text for each in self._values(number, name))]))

    def from_first(self, name: str, make: Callable[[], T]) -> T:
        return self._result(next(self._numbers), name, make)

    def _result(self, number: int, name: str, make: Callable[[], T]) -> T:
        """In process 0, call `make`, and send its result or its error to the others. All return or raise it."""
        if self.is_first:
            answer = Value(number, name, answer_of(make))
            self._network.call(self._member.send, answer)
        else:
            # This process waits longer than process 0, because the error of process 0 names the missing process.
            (answer,) = self._values(number, name, _FLUSH_SECONDS)
        return result_of(answer.text)

    def _values(self, number: int, name: str, more: float = 0.0) -> list[Value]:
        with phase("agreement"):
            return self._network.result(self._member.values(number, name, self.longest_wait + more))

    def spent(self) -> Mapping[int, Spent]:
        return {process: (alive.step, alive.spent) for process, alive in self.watchdog.heartbeats().items()}

    def abandon(self, reason: str, code: int) -> None:
        loss, own_reason = self.watchdog.loss(), f"ended: {reason}"
        if loss is not None and loss.reason != own_reason:
            end_now(str(loss), loss.code)
        self.fail(own_reason, code)
        end_now(reason, code)

    def fail(self, reason: str, code: int) -> None:
        """Send the reason for the failure of this process to the others."""
        self._send_last(Lost(self.process_index, reason[:_LONGEST_REASON], code))

    def finish(self) -> bool:
        """Notify the others that this process is done. Return whether all are done in `timeouts.shutdown` seconds."""
        with contextlib.suppress(TimeoutError):
            self._network.result(self._member.finish(), self.timeouts.shutdown)
            return True
        return False

    def leave(self) -> None:
        """Close the connections cleanly, so that the other processes do not report a loss.

        Before this call, the loss of a process is reported in one line. After this call, JAX may detect a loss first,
        and end this process by SIGABRT.
        """
        self._send_last(Left())
        self._network.close()

    def _send_last(self, message: messages.Message) -> None:
        async def send() -> None:
            # This process ends now, so the end of another process is not a loss.
            self.watchdog.close()
            self._member.send(message)
            for connection in self._member.connections.values():
                with contextlib.suppress(OSError):
                    await connection.writer.drain()

        with contextlib.suppress(TimeoutError):
            self._network.result(send(), _FLUSH_SECONDS)


class Member:
    """This process in its job. Only the thread of the event loop calls the methods.

    Attributes:
        hosts: the name of the host of each process that has joined.
        connections: the connections by process: process 0 is connected to all others, and they only to process 0.
        jax_address: the address of JAX's coordinator; set when all have joined.
    """

    def __init__(self, job: Job, facts: Mapping[str, str]):
        self._job, self._facts = job, facts
        self.hosts, self.connections = {0: job.host}, dict[int, Connection]()
        self.jax_address, self._watchdog = "", None
        self._values, self._values_changed = defaultdict[int, dict[int, Value]](dict), asyncio.Condition()

    def watch(self, timeouts: Timeouts, end: Callable[[Lost], None]) -> Watchdog:
        """Watch the connected processes, and let them watch this one."""
        self._watchdog = Watchdog(self._job.process_id, self.connections, self.hosts, timeouts, end)
        return self._watchdog

    async def listen(self, process: int, connection: Connection) -> None:
        """Receive the messages of a process until its connection ends."""
        async for message in connection.messages():
            if isinstance(message, Value):
                async with self._values_changed:
                    self._values[message.number][process] = message
                    self._values_changed.notify_all()
            if self._watchdog is not None:
                self._watchdog.receive(process, message)
        if self._watchdog is not None:
            self._watchdog.record_disconnection(process)

    async def values(self, number: int, name: str, timeout: float) -> list[Value]:
        """Return the values of all connected processes in the exchange with this number, in the order of their ids.

        Raises:
            Unreachable: a process sends no value in time.
            InputError: a process makes an exchange with another name.
        """
        # A value may arrive before this process waits for it.
        values, others = self._values[number], self.connections.keys()
        try:
            async with asyncio.timeout(timeout), self._values_changed:
                await self._values_changed.wait_for(lambda: values.keys() >= others)
        except TimeoutError:
            problem = f"{name}: process {min(others - values.keys())} gave no value in {timeout:g} s"
            raise Unreachable(problem, advice=_SAME_PROGRAM) from None
        finally:
            del self._values[number]
        for process, value in sorted(values.items()):
            if value.name != name:
                raise InputError(f"{name}: process {process} is at {value.name!r} instead", advice=_SAME_PROGRAM)
        return [values[process] for process in sorted(others)]

    async def finish(self) -> None:
        """Wait until all processes are done. Process 0 is done when all others are."""
        assert self._watchdog is not None
        if self._job.process_id:
            self.send(Done())
        await self._watchdog.all_done.wait()
        if not self._job.process_id:
            self.send(Done())

    def send(self, message: messages.Message) -> None:
        """Send a message to all connected processes."""
        for connection in self.connections.values():
            connection.send(message)


class Leader(Member):
    """Process 0, which admits all processes, or sends each process the reason why the job cannot start."""

    def __init__(self, job: Job, facts: Mapping[str, str]):
        super().__init__(job, facts)
        self._admission, self._hellos = Admission(job, facts, "process", job.num_processes), dict[int, messages.Hello]()
        self._is_decided = asyncio.Event()
        self._problem: JaxddpError | None = None
        self.hosts[0] = socket.gethostname()

    async def meet(self, timeouts: Timeouts, end: Callable[[Lost], None]) -> Watchdog:
        """Wait until all others have joined, and watch them. Raises: see `ControlPlane`."""
        # Each process has a connection to this server and one to JAX's coordinator.
        raise_file_limit(2 * self._job.num_processes)
        deadline = time.monotonic() + timeouts.start
        listener = _inherited_socket() or await _listen_once_resolved(self._job.host, self._job.port, deadline)
        server = await self._admission.start_server(listener, self._serve)
        try:
            async with asyncio.timeout_at(deadline):
                await self._is_decided.wait()
        except TimeoutError:
            listening, strangers = listener.getsockname()[0], self._admission.num_strangers
            self._problem = absence(self._job.num_processes, self.hosts, timeouts.start, listening, strangers)
        if self._problem is not None:
            server.close()
            self.send(messages.Refusal(str(self._problem), self._problem.exit_code))
            await asyncio.gather(*(connection.close() for connection in self.connections.values()))
            raise self._problem
        # The address is on the interface of this server.
        self.jax_address = messages.free_address(listener)
        watchdog = self.watch(timeouts, end)
        for process, hello in self._hellos.items():
            self.connections[process].send(messages.make_welcome(hello, self._job.key, self.jax_address))
        return watchdog

    async def _serve(self, connection: Connection, hello: messages.Hello) -> None:
        problem = self._admit(connection, hello)
        if problem is not None:
            connection.send(messages.Refusal(str(problem), problem.exit_code))
            return
        await self.listen(hello.process, connection)
        if not self._is_decided.is_set():
            # Until all have joined, the process may be started again.
            del self.connections[hello.process], self.hosts[hello.process], self._hellos[hello.process]

    def _admit(self, connection: Connection, hello: messages.Hello) -> JaxddpError | None:
        """Admit a process, or return the reason for its refusal. After a conflict, every process is refused."""
        process, count = hello.process, self._job.num_processes
        if self._is_decided.is_set():
            if self._watchdog is not None and self._watchdog.is_over:
                return Unreachable(f"process {process} joined again while the job is ending; start it again")
            advice = f"is JAX_PROCESS_ID={process} given twice, or is this another job's address?"
            problem = f"all {count} processes of the job there have joined already"
            return self._problem or InputError(problem, advice=advice)
        reason = conflict(hello, count, self.hosts) or self._admission.difference(hello)
        if reason is not None:
            self._problem = InputError(reason)
        else:
            self.connections[process], self.hosts[process], self._hellos[process] = connection, hello.host, hello
        if self._problem is not None or len(self.hosts) == count:
            self._is_decided.set()
        return self._problem


class Follower(Member):
    """A process that joins process 0."""

    async def meet(self, timeouts: Timeouts, end: Callable[[Lost], None]) -> Watchdog:
        """Join the job, wait until all others have joined, and watch process 0. Raises: see `ControlPlane`."""
        client, deadline = Client(self._job, self._facts, "process"), time.monotonic() + timeouts.start

        async def greet(connection: Connection) -> Connection:
            async with asyncio.timeout_at(deadline):
                challenge = await client.challenge(connection)
            # Process 0 has answered, so an error below is its end: another attempt would not help.
            try:
                async with asyncio.timeout_at(deadline + _ANSWER_SECONDS):
                    self.jax_address = await client.join(connection, challenge)
            except TimeoutError:
                raise Unreachable(f"no answer in {timeouts.start:g} s; is it process 0 of this job?") from None
            except ConnectionResetError:
                raise Unreachable("process 0 ended before all processes had joined") from None
            return connection

        self.connections[0] = await client.connect(timeouts.start, greet)
        watchdog = self.watch(timeouts, end)
        self._listening = asyncio.ensure_future(self.listen(0, self.connections[0]))
        return watchdog


def conflict(hello: messages.Hello, count: int, hosts: Mapping[int, str]) -> str | None:
    """Return the reason why the sender of a hello cannot join; None if it can.

    Args:
        count: the number of processes of the job.
        hosts: the host of each process that has joined, with process 0.
    """
    process, there, each = hello.process, f"on {hello.host}", "give each process its own id"
    if hello.count != count:
        counts = f"process 0 has {count}, process {process} {there} has {hello.count}"
        return f"JAX_NUM_PROCESSES differs: {counts}; start every process with the same number"
    if process >= count:
        return f"JAX_PROCESS_ID={process} {there}: expected 0 to {count - 1}; {each}"
    if process in hosts:
        return f"JAX_PROCESS_ID={process} twice: on {hosts[process]} and {there}; {each}, 0 to {count - 1}"
    return None


def absence(count: int, hosts: Mapping[int, str], timeout: float, listening: str, strangers: int = 0) -> Unreachable:
    """Return the error that names the processes that did not join in `timeout` seconds; see `conflict`.

    Args:
        listening: the address where process 0 listens.
        strangers: the number of clients that were refused because of another run id or key.
    """
    absent = [str(process) for process in range(count) if process not in hosts]
    names = f"{plural(len(absent), 'process')} {listed(absent, most=_MOST_NAMED)}"
    others = f"; refused {strangers}, of another job or with another {messages.KEY}" if strangers else ""
    place = f" (process 0 listens on {listening}{others})"
    advice = "start all of them, or raise ", Key("parallel.start_timeout"), place
    return Unreachable(f"{names} of {count} did not join in {timeout:g} s", advice=advice)


async def _listen_once_resolved(host: str, port: int, deadline: float) -> socket.socket:
    """Return a socket that listens at a host's port, as soon as the host's name has an address of this machine.

    Kubernetes publishes the name of a pod only after the pod has started. Until then the name has no address, or the
    address of an earlier pod. `deadline` is a time of the monotonic clock.

    Raises:
        Unreachable: the name has no address of this machine before `deadline`.
        InputError: see `listen`.
    """
    while True:
        try:
            # The look-up blocks the event loop, which has no connections yet. The resolver limits its time.
            return messages.listen(host, port)
        except messages.NotResolved as error:
            if time.monotonic() + _RESOLVE_SECONDS > deadline:
                raise Unreachable(str(error)) from error
        await asyncio.sleep(_RESOLVE_SECONDS)


def _inherited_socket() -> socket.socket | None:
    """Return the listening socket that this process inherits from its launcher, if any.

    Raises: InputError if the variable of the launcher holds no socket.
    """
    descriptor = inherited(INHERITED_SOCKET)
    try:
        return None if descriptor is None else socket.socket(fileno=descriptor)
    except OSError as error:
        problem = f"{INHERITED_SOCKET}={descriptor}: is no socket ({error.strerror})"
        raise InputError(problem, advice="a launcher sets it for the process that it starts; unset it") from None


def _start_proxy(coordinator: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start `jaxddp.job.coordinator_proxy`, and return its process and its address.

    If the proxy does not start, return the coordinator. Raises: InputError if it is no address.
    """
    host, port = messages.split_address(coordinator)
    proxy = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_PROXY), host, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert proxy.stdout is not None
    ready, _, _ = select.select([proxy.stdout], [], [], _PROXY_SECONDS)
    line = proxy.stdout.readline() if ready else b""
    return proxy, f"{messages.LOOPBACK}:{int(line)}" if line.strip().isdigit() else coordinator
