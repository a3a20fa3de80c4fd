"""The connection of a process to its job. One thread serves all network connections of the process."""

import asyncio
import contextlib
import itertools
import select
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from jaxddp.core.errors import InputError, Unreachable, about, error_from
from jaxddp.job.environment import Job
from jaxddp.job.follower import Follower
from jaxddp.job.leader import Leader
from jaxddp.job.ports import LOOPBACK, split_address
from jaxddp.job.process_messages import Alive, Left, Lost, Message, Reply, Value
from jaxddp.job.watchdog import Loss, Timeouts, end_process
from jaxddp.wire.network_thread import NetworkThread

_PROXY = Path(__file__).with_name("coordinator_proxy.py")
_PROXY_SECONDS = 10.0
_FLUSH_SECONDS = 2.0
_LONGEST_REASON = 10_000


class ControlPlane:
    """The connection of this process to its job. Any thread may call a method, but only one thread at a time.

    Attributes:
        job: this process's place in the job.
        watchdog: watches the other processes.
        timeouts: how long this process waits for the others.
        jax_address: the coordinator's address for `jax.distributed.initialize`.
    """

    def __init__(self, job: Job, role: Leader | Follower, network: NetworkThread, timeouts: Timeouts):
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
        end: Callable[[Loss], None] = end_process,
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

    def decide(self, name: str, text: str, decide: Callable[[list[str]], str], timeout: float) -> str:
        """Gather a text from each process, pass the texts to `decide` in process 0, and return its result in all.

        The texts are in the order of the processes' ids. All processes must make the same calls in the same order.

        Raises:
            InputError: `decide` raised this error in process 0; or a process makes a call with another name.
            Unreachable: `decide` raised this error in process 0; or a process sends no text in time. An error of
                `decide` is raised in every process.
        """
        value = Value(next(self._numbers), name, text)
        if isinstance(self._role, Follower):
            self._network.call(self._role.send, value)
            # This process waits longer than process 0, because the error of process 0 names the missing process.
            return _text(self._network.result(self._role.answer(value.number, name, timeout + _FLUSH_SECONDS)))
        return _text(self._decide(self._role, value, decide, timeout))

    def broadcast(self, name: str, make: Callable[[], str], timeout: float) -> str:
        """Call `make` in process 0 without waiting for others, and return its result in all. Raises: see `decide`."""
        number = next(self._numbers)
        if isinstance(self._role, Follower):
            return _text(self._network.result(self._role.answer(number, name, timeout)))
        reply = _reply(number, name, make)
        self._network.call(self._role.send, reply)
        return _text(reply)

    def heartbeats(self) -> dict[int, Alive]:
        """Return the last heartbeats by process id. They are complete in process 0 only."""

        async def read() -> dict[int, Alive]:
            return self.watchdog.heartbeats()

        return self._network.result(read())

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

    def _send_last(self, message: Message) -> None:
        async def send() -> None:
            # This process ends now, so the end of another process is not a loss.
            self.watchdog.close()
            for connection in self._role.send(message):
                with contextlib.suppress(OSError):
                    await connection.writer.drain()

        self._run(send(), _FLUSH_SECONDS)

    def _decide(self, role: Leader, value: Value, decide: Callable[[list[str]], str], timeout: float) -> Reply:
        def make() -> str:
            return decide(self._network.result(role.gather(value.number, value.name, value.text, timeout)))

        reply = _reply(value.number, value.name, make)
        self._network.call(role.send, reply)
        return reply

    def _run(self, coroutine: Coroutine[Any, Any, None], timeout: float) -> bool:
        """Run a coroutine, and return whether it ended in time."""

        async def run_in_time() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await coroutine
                    return True
            return False

        with contextlib.suppress(TimeoutError):
            return self._network.result(run_in_time(), timeout + _FLUSH_SECONDS)
        return False


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


def _reply(number: int, name: str, make: Callable[[], str]) -> Reply:
    try:
        return Reply(number, name, make())
    except (InputError, Unreachable) as error:
        return Reply(number, name, "", error.to_json(), error.exit_code)


def _text(reply: Reply) -> str:
    if reply.error:
        raise error_from(reply.code, reply.error)
    return reply.text
