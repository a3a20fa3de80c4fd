"""The connections between the processes of a job, over which they exchange values and watch each other.

Process 0, the leader, admits the other processes, the followers. A follower is connected only to process 0. All
processes join before `jax.distributed.initialize`. So a conflict, which would hang or crash JAX, raises a one-line
error. One thread serves all network connections of a process.
"""

import asyncio
import contextlib
import itertools
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxddp.core.errors import InputError, JaxddpError, Key, Preempted, Unreachable, about, error_from, plural
from jaxddp.core.peers import Peers, Spent
from jaxddp.core.phases import phase
from jaxddp.core.process_exit import end_now
from jaxddp.job.environment import INHERITED_SOCKET, Job, inherited
from jaxddp.job.watchdog import Alive, Done, Left, Lost, Timeouts, Watchdog, end_process
from jaxddp.wire.connection import Admission, Client, Connection, NetworkThread, raise_file_limit
from jaxddp.wire.messages import (
    KEY,
    LOOPBACK,
    Challenge,
    ExitCode,
    Hello,
    Message,
    NotResolved,
    Number,
    Refusal,
    free_address,
    listen,
    make_welcome,
    split_address,
)

_PROXY = Path(__file__).with_name("coordinator_proxy.py")
_PROXY_SECONDS, _FLUSH_SECONDS, _RESOLVE_SECONDS = 10.0, 2.0, 0.2
_ANSWER_SECONDS = 5.0
"""Additional seconds that a follower waits after its timeout. Process 0 has the same timeout, and its error names the
absent process."""
_LONGEST_REASON = 10_000
_SAME_PROGRAM = "does it run the same program?"
_MOST_NAMED = 8


@dataclass(frozen=True)
class Value(Message):
    """The text of the sender in the exchange with this number."""

    number: Number
    name: str
    text: str


@dataclass(frozen=True)
class Reply(Message):
    """The result of an exchange, which process 0 computes, or its error as JSON and the exit code of the error."""

    number: Number
    name: str
    text: str
    error: str = ""
    code: ExitCode = 2


class ControlPlane(Peers):
    """The connection of this process to its job. Any thread may call a method, but only one thread at a time.

    Attributes:
        job: this process's place in the job.
        watchdog: watches the other processes.
        timeouts: how long this process waits for the others.
        jax_address: the coordinator's address for `jax.distributed.initialize`.
    """

    def __init__(self, job: Job, role: "Leader | Follower", network: NetworkThread, timeouts: Timeouts):
        assert role.watchdog is not None
        self.job, self.watchdog, self.timeouts, self.jax_address = job, role.watchdog, timeouts, role.jax_address
        if job.process_id:
            # The reference keeps the proxy running as long as this object exists.
            self._proxy, self.jax_address = _start_proxy(role.jax_address)
        self._role, self._network = role, network
        self._numbers = itertools.count()

    @classmethod
    def join(
        cls,
        job: Job,
        facts: Mapping[str, str],
        timeout: float,
        *,
        timeouts: Timeouts = Timeouts(),  # noqa: B008
        end: Callable[[Lost], None] = end_process,
    ) -> "ControlPlane":
        """Wait until all processes have joined, and compare their facts. Afterwards the processes watch each other.

        Args:
            facts: values by name that must be equal in all processes, such as versions.
            timeout: the maximum number of seconds until all processes have joined.
            timeouts: how long this process waits for the others after it has joined.
            end: called with the first loss, after this process has sent the loss to the others. By default, `end` ends
                this process.

        Raises:
            InputError: the address is taken or wrong; a process joins twice, belongs to another job, or has a different
                number of processes, key or facts.
            Unreachable: process 0 cannot be reached, or another process does not join in time; or the coordinator's
                name does not resolve to the host of process 0 in time.
        """
        network = NetworkThread("jaxddp-job")

        async def meet() -> Leader | Follower:
            role = Follower(job, facts) if job.process_id else Leader(job, facts)
            with about(f"coordinator {job.coordinator}"):
                await role.meet(timeout, timeouts, end)
            return role

        try:
            return cls(job, network.result(meet()), network, timeouts)
        except BaseException:
            network.close()
            raise

    @property
    def process_index(self) -> int:
        return self.job.process_id

    @property
    def process_count(self) -> int:
        return self.job.num_processes

    @property
    def longest_wait(self) -> float:
        return self.timeouts.longest

    def decide(self, name: str, text: str, decide: Callable[[list[str]], str]) -> str:
        """See `Peers.decide`. Raises: InputError if a process makes a call with another name."""
        value, role = Value(next(self._numbers), name, text), self._role
        with phase("agreement"):
            if isinstance(role, Follower):
                self._network.call(role.send, value)
                # This process waits longer than process 0, because the error of process 0 names the missing process.
                return self._network.result(role.answer(value.number, name, self.longest_wait + _FLUSH_SECONDS))

            def make() -> str:
                return decide(self._network.result(role.gather(value, self.longest_wait)))

            return self._reply(value.number, name, make)

    def from_first(self, name: str, make: Callable[[], str]) -> str:
        number = next(self._numbers)
        if isinstance(self._role, Leader):
            return self._reply(number, name, make)
        with phase("agreement"):
            return self._network.result(self._role.answer(number, name, self.longest_wait))

    def spent(self) -> Mapping[int, Spent]:
        async def read() -> dict[int, Alive]:
            return self.watchdog.heartbeats()

        return {process: (alive.step, alive.spent) for process, alive in self._network.result(read()).items()}

    def abandon(self, reason: str, code: int) -> None:
        if code == Preempted.exit_code:
            return
        loss, own_reason = self.watchdog.loss(), f"ended: {reason}"
        if loss is not None and loss.reason != own_reason:
            end_now(str(loss), loss.code)
        self.fail(own_reason, code)
        end_now(reason, code)

    def fail(self, reason: str, code: int) -> None:
        """Send the reason for the failure of this process to the others."""
        self._send_last(Lost(self.job.process_id, reason[:_LONGEST_REASON], code))

    def finish(self) -> bool:
        """Notify the others that this process is done. Return whether all are done in `timeouts.shutdown` seconds."""
        return self._run(self._role.finish(), self.timeouts.shutdown)

    def leave(self) -> None:
        """Close the connections cleanly, so that the other processes do not report a loss.

        Before this call, the loss of a process is reported in one line. After this call, JAX may detect a loss first,
        and end this process by SIGABRT.
        """
        self._send_last(Left())
        self._network.close()

    def _reply(self, number: int, name: str, make: Callable[[], str]) -> str:
        """Call `make` in process 0, and send its result or its error to the others."""
        try:
            text = make()
        except (InputError, Unreachable) as error:
            self._network.call(self._role.send, Reply(number, name, "", error.to_json(), error.exit_code))
            raise
        self._network.call(self._role.send, Reply(number, name, text))
        return text

    def _send_last(self, message: Message) -> None:
        async def send() -> None:
            # This process ends now, so the end of another process is not a loss.
            self.watchdog.close()
            for connection in self._role.send(message):
                with contextlib.suppress(OSError):
                    await connection.writer.drain()

        self._run(send(), _FLUSH_SECONDS)

    def _run(self, coroutine: Coroutine[Any, Any, None], timeout: float) -> bool:
        """Run a coroutine, and return whether it ended in time."""
        try:
            self._network.result(asyncio.wait_for(coroutine, timeout), timeout + _FLUSH_SECONDS)
        except TimeoutError:
            return False
        return True


class Leader:
    """Process 0, connected to all others. Only the thread of the event loop calls the methods.

    Attributes:
        jax_address: the address of JAX's coordinator, on the interface of this server; set when all have joined.
        watchdog: watches the other processes; set when all have joined.
    """

    def __init__(self, job: Job, facts: Mapping[str, str]):
        self._job, self._hosts = job, {0: socket.gethostname()}
        self._admission = Admission(
            *(job.identity, facts, "process"),
            other_run="it serves another job; give each job its own port",
            advice="install the same version on every host",
            expected=job.num_processes,
        )
        self._followers = dict[int, tuple[Connection, Hello]]()
        self._is_decided = asyncio.Event()
        self._problem: JaxddpError | None = None
        self._values = dict[int, dict[int, Value]]()
        self._values_changed = asyncio.Condition()
        self.jax_address = ""
        self.watchdog: Watchdog | None = None

    async def meet(self, timeout: float, timeouts: Timeouts, end: Callable[[Lost], None]) -> None:
        """Admit all processes, or send each process the reason why the job cannot start.

        Raises:
            InputError, Unreachable: see `ControlPlane.join`.
        """
        # Each process has a connection to this server and one to JAX's coordinator.
        raise_file_limit(2 * self._job.num_processes)
        descriptor, deadline = inherited(INHERITED_SOCKET), time.monotonic() + timeout
        if descriptor is not None:
            listener = _inherited_socket(descriptor)
        else:
            listener = await _listen_once_resolved(self._job.host, self._job.port, deadline)
        server = await self._admission.start_server(listener, self._serve)
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                await self._is_decided.wait()
        except TimeoutError:
            listening, strangers = listener.getsockname()[0], self._admission.num_strangers
            self._problem = absence(self._job.num_processes, self._hosts, timeout, listening, strangers)
        if self._problem is not None:
            server.close()
            refusal = Refusal(str(self._problem), self._problem.exit_code)
            await asyncio.gather(*(connection.close() for connection in self.send(refusal)))
            raise self._problem
        self.jax_address = free_address(listener)
        connections = {process: connection for process, (connection, _) in self._followers.items()}
        self.watchdog = Watchdog(0, connections, self._hosts, timeouts, end)
        for connection, hello in self._followers.values():
            connection.send(make_welcome(hello, self._job.key, self.jax_address))
        self._beating = asyncio.ensure_future(self.watchdog.beat())

    async def gather(self, own: Value, timeout: float) -> list[str]:
        """Return the values of all processes, in the order of their ids.

        Raises:
            Unreachable: a process sends no value in time.
            InputError: a process makes an exchange with another name.
        """
        values = self._values.setdefault(own.number, {})
        others = set(range(1, self._job.num_processes))
        try:
            async with asyncio.timeout(timeout), self._values_changed:
                await self._values_changed.wait_for(lambda: values.keys() >= others)
        except TimeoutError:
            missing = min(others - values.keys())
            problem = f"{own.name}: process {missing} gave no value in {timeout:g} s"
            raise Unreachable(problem, advice=_SAME_PROGRAM) from None
        del self._values[own.number]
        for process, value in sorted(values.items()):
            if value.name != own.name:
                problem = f"{own.name}: process {process} is at {value.name!r} instead"
                raise InputError(problem, advice=_SAME_PROGRAM)
        return [own.text, *(values[process].text for process in sorted(others))]

    async def finish(self) -> None:
        """Wait until all others are done, and notify them that this process is done."""
        assert self.watchdog is not None
        await self.watchdog.all_done.wait()
        self.send(Done())

    def send(self, message: Message) -> list[Connection]:
        """Send a message to all others, and return their connections."""
        connections = [connection for connection, _ in self._followers.values()]
        for connection in connections:
            connection.send(message)
        return connections

    async def _serve(self, connection: Connection, hello: Hello) -> None:
        problem = self._admit(hello, connection)
        if problem is not None:
            connection.send(Refusal(str(problem), problem.exit_code))
        else:
            await self._listen(hello.process, connection)

    def _admit(self, hello: Hello, connection: Connection) -> JaxddpError | None:
        """Admit a process, or return the reason for its refusal. After a conflict, every process is refused."""
        count = self._job.num_processes
        if self._is_decided.is_set():
            if self.watchdog is not None and self.watchdog.is_over:
                return Unreachable(f"process {hello.process} joined again while the job is ending; start it again")
            return self._problem or InputError(
                f"all {count} processes of the job there have joined already; is JAX_PROCESS_ID={hello.process} given "
                "twice, or is this another job's address?"
            )
        reason = conflict(hello, count, self._hosts) or self._admission.difference(hello)
        if reason is not None:
            self._problem = InputError(reason)
        else:
            self._followers[hello.process] = connection, hello
            self._hosts[hello.process] = hello.host
        if self._problem is not None or len(self._hosts) == count:
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
            del self._followers[process], self._hosts[process]
        elif self.watchdog is not None:
            self.watchdog.record_disconnection(process)


class Follower:
    """A follower in its own process. Only the thread of the event loop calls the methods.

    Attributes:
        jax_address: the address of JAX's coordinator; set when all processes have joined.
        watchdog: watches process 0; set when all processes have joined.
    """

    watchdog: Watchdog

    def __init__(self, job: Job, facts: Mapping[str, str]):
        server, started = "process 0 of a jaxddp job; give another port", "process 0 started"
        self._client = Client(job.identity, job.coordinator, facts, "process", server=server, started=started)
        self._job, self._answers = job, dict[int, asyncio.Future[Reply]]()
        self.jax_address = ""

    async def meet(self, timeout: float, timeouts: Timeouts, end: Callable[[Lost], None]) -> None:
        """Join the job, and wait until all other processes have joined.

        Raises:
            InputError, Unreachable: see `ControlPlane.join`.
        """
        deadline = time.monotonic() + timeout

        async def greet(connection: Connection) -> tuple[Connection, Challenge]:
            remaining = max(deadline - time.monotonic(), 0)
            async with asyncio.timeout(remaining):
                return connection, await self._client.challenge(connection)

        self._connection, challenge = await self._client.connect(timeout, greet)
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0) + _ANSWER_SECONDS):
                self.jax_address = await self._client.join(self._connection, challenge)
        except TimeoutError:
            raise Unreachable(f"no answer in {timeout:g} s; is it process 0 of this job?") from None
        except ConnectionResetError:
            raise Unreachable("process 0 ended before all processes had joined") from None
        finally:
            if not self.jax_address:
                await self._connection.close()
        self.watchdog = Watchdog(self._job.process_id, {0: self._connection}, {0: self._job.host}, timeouts, end)
        self._listening = asyncio.ensure_future(self._listen())
        self._beating = asyncio.ensure_future(self.watchdog.beat())

    async def answer(self, number: int, name: str, timeout: float) -> str:
        """Return the result of process 0 in the exchange with this number.

        Raises:
            Unreachable: process 0 sends no reply in time.
            InputError: the exchange has another name in process 0.
            InputError, Unreachable: process 0 sent this error.
        """
        try:
            async with asyncio.timeout(timeout):
                reply = await self._answer(number)
        except TimeoutError:
            raise Unreachable(f"{name}: process 0 gave no answer in {timeout:g} s", advice=_SAME_PROGRAM) from None
        finally:
            self._answers.pop(number, None)
        if reply.name != name:
            raise InputError(f"{name}: process 0 is at {reply.name!r} instead", advice=_SAME_PROGRAM)
        if reply.error:
            raise error_from(reply.code, reply.error)
        return reply.text

    async def finish(self) -> None:
        """Notify process 0 that this process is done, and wait until all processes are done."""
        self._connection.send(Done())
        await self.watchdog.all_done.wait()

    def send(self, message: Message) -> list[Connection]:
        """Send a message to process 0, and return its connection."""
        self._connection.send(message)
        return [self._connection]

    def _answer(self, number: int) -> asyncio.Future[Reply]:
        # The reply may arrive before this process waits for it.
        return self._answers.setdefault(number, asyncio.get_running_loop().create_future())

    async def _listen(self) -> None:
        async for message in self._connection.messages():
            self.watchdog.receive(0, message)
            if isinstance(message, Reply) and not (answer := self._answer(message.number)).done():
                answer.set_result(message)
        self.watchdog.record_disconnection(0)


def conflict(hello: Hello, count: int, hosts: Mapping[int, str]) -> str | None:
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


def absence(
    count: int, hosts: Mapping[int, str], timeout: float, listening: str, num_strangers: int = 0
) -> Unreachable:
    """Return the error that names the processes that did not join in time.

    Args:
        count: the number of processes of the job.
        hosts: the host of each process that has joined, with process 0.
        timeout: seconds.
        listening: the address where process 0 listens.
        num_strangers: the number of clients that were refused because of another run id or key.
    """
    absent = count - len(hosts)
    first = (str(process) for process in range(count) if process not in hosts)
    names = f"{plural(absent, 'process')} {', '.join(itertools.islice(first, _MOST_NAMED))}"
    more = f" and {absent - _MOST_NAMED:,} more" if absent > _MOST_NAMED else ""
    others = f"; refused {num_strangers}, of another job or with another {KEY}" if num_strangers else ""
    place = f" (process 0 listens on {listening}{others})"
    advice = "start all of them, or raise ", Key("parallel.start_timeout"), place
    return Unreachable(f"{names}{more} of {count} did not join in {timeout:g} s", advice=advice)


async def _listen_once_resolved(host: str, port: int, deadline: float) -> socket.socket:
    """Return a socket that listens at a host's port, as soon as the host's name has an address of this machine.

    Kubernetes publishes the name of a pod only after the pod has started. Until then the name has no address, or the
    address of an earlier pod.

    Args:
        deadline: when to stop trying, a time of the monotonic clock.

    Raises:
        Unreachable: the name has no address of this machine before `deadline`.
        InputError: see `listen`.
    """
    while True:
        try:
            # The look-up blocks the event loop, which has no connections yet. The resolver limits its time.
            return listen(host, port)
        except NotResolved as error:
            if time.monotonic() + _RESOLVE_SECONDS > deadline:
                raise Unreachable(str(error)) from error
        await asyncio.sleep(_RESOLVE_SECONDS)


def _inherited_socket(descriptor: int) -> socket.socket:
    """Return the listening socket that this process inherits. Raises InputError if it is no socket."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError as error:
        problem = f"{INHERITED_SOCKET}={descriptor}: is no socket ({error.strerror})"
        raise InputError(problem, advice="a launcher sets it for the process that it starts; unset it") from None


def _start_proxy(coordinator: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start `jaxddp.job.coordinator_proxy`, and return its process and its address.

    If the proxy does not start, return the address of JAX's coordinator itself.

    Raises:
        InputError: `coordinator` is not an address.
    """
    host, port = split_address(coordinator)
    proxy = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_PROXY), host, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert proxy.stdout is not None
    ready, _, _ = select.select([proxy.stdout], [], [], _PROXY_SECONDS)
    line = proxy.stdout.readline() if ready else b""
    return proxy, f"{LOOPBACK}:{int(line)}" if line.strip().isdigit() else coordinator
