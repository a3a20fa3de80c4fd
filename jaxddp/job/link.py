"""A process's connection with its job, in one thread of its own, however many processes there are."""

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
from jaxddp.job.host import Host
from jaxddp.job.member import Member
from jaxddp.job.messages import Alive, Answer, Left, Lost, Message, Value
from jaxddp.job.network_thread import NetworkThread
from jaxddp.job.ports import LOOPBACK, split_address
from jaxddp.job.watch import Loss, Waits, end_process

_KEEPER = Path(__file__).with_name("keeper.py")
_KEEPER_SECONDS = 10.0
_FLUSH_SECONDS = 2.0
_LONGEST_REASON = 10_000


class Link:
    """What the other threads of a process ask of its side of the job, one question after the other.

    Attributes:
        job: this process's place in it.
        watch: of the other processes.
        waits: how long this one waits for them.
        jax_address: for `jax.distributed.initialize`.
    """

    def __init__(self, job: Job, side: Host | Member, network: NetworkThread, waits: Waits):
        assert side.watch is not None
        self.job, self.watch, self.waits, self.jax_address = job, side.watch, waits, side.jax_address
        if job.process_id:
            # It lives as long as this object.
            self._keeper, self.jax_address = _kept(side.jax_address)
        self._side, self._network = side, network
        self._numbers = itertools.count()

    @classmethod
    def meet(
        cls,
        job: Job,
        facts: Mapping[str, str],
        timeout: float,
        *,
        waits: Waits = Waits(),  # noqa: B008
        end: Callable[[Loss], None] = end_process,
    ) -> "Link":
        """Wait until all processes have joined, and compare their facts; from then on they watch each other.

        Args:
            facts: values by name that must be the same in all processes (versions).
            timeout: seconds.
            waits: how long this process waits for the others from then on.
            end: called with the first loss, once the others are told; by default it ends this process.

        Raises:
            InputError: the address is taken or wrong; a process joins twice, has another number of processes, belongs
                to another job, does not know the job's key, or has other facts.
            Unreachable: process 0 is out of reach, or another one does not come in time.
        """
        network = NetworkThread("jaxddp-job")

        async def met() -> Host | Member:
            side = Member(job, facts) if job.process_id else Host(job, facts)
            with about(f"coordinator {job.coordinator}"):
                await side.meet(timeout, waits, end)
            return side

        try:
            return cls(job, network.result(met()), network, waits)
        except BaseException:
            network.close()
            raise

    def decide(self, name: str, text: str, decide: Callable[[list[str]], str], timeout: float) -> str:
        """What process 0 makes of the texts of all processes, in order of their ids; all must call this alike.

        Raises:
            InputError: that of process 0, on every process; or one is elsewhere.
            Unreachable: the same; or one gives no text in time.
        """
        value = Value(next(self._numbers), name, text)
        if isinstance(self._side, Member):
            self._network.call(self._side.tell, value)
            # Process 0 knows better what it waits for.
            return _text(self._network.result(self._side.answer(value.number, name, timeout + _FLUSH_SECONDS)))
        return _text(self._decided(self._side, value, decide, timeout))

    def spread(self, name: str, make: Callable[[], str], timeout: float) -> str:
        """What process 0 makes; it alone calls the function, and waits for nobody. Raises: as `decide`."""
        number = next(self._numbers)
        if isinstance(self._side, Member):
            return _text(self._network.result(self._side.answer(number, name, timeout)))
        answer = _made(number, name, make)
        self._network.call(self._side.tell, answer)
        return _text(answer)

    def standings(self) -> dict[int, Alive]:
        """Where each process stands; only process 0 hears of all."""

        async def found() -> dict[int, Alive]:
            return self.watch.standings()

        return self._network.result(found())

    def fail(self, reason: str, code: int) -> None:
        """Tell the others that this process fails, and why."""

        self._last(Lost(self.job.process_id, reason[:_LONGEST_REASON], code))

    def finish(self) -> bool:
        """Say that this process ends in order, and wait for `waits.shutdown` at most; whether all do by then."""
        return self._in_time(self._side.finish(), self.waits.shutdown)

    def leave(self) -> None:
        """Tell the others that this process needs them no more, and let go of them.

        Until then one that is lost is said in a line; JAX, where it notices first, ends the process by SIGABRT.
        """
        self._last(Left())
        self._network.close()

    def _last(self, message: Message) -> None:
        async def said() -> None:
            # From here on nobody's end is a loss: this process ends itself.
            self.watch.close()
            for connection in self._side.tell(message):
                with contextlib.suppress(OSError):
                    await connection.writer.drain()

        self._in_time(said(), _FLUSH_SECONDS)

    def _decided(self, side: Host, value: Value, decide: Callable[[list[str]], str], timeout: float) -> Answer:
        def decided() -> str:
            return decide(self._network.result(side.gather(value.number, value.name, value.text, timeout)))

        answer = _made(value.number, value.name, decided)
        self._network.call(side.tell, answer)
        return answer

    def _in_time(self, coroutine: Coroutine[Any, Any, None], timeout: float) -> bool:
        async def limited() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await coroutine
                    return True
            return False

        with contextlib.suppress(TimeoutError):
            return self._network.result(limited(), timeout + _FLUSH_SECONDS)
        return False


def _kept(coordinator: str) -> tuple[subprocess.Popen[bytes], str]:
    """A process that keeps the connection with JAX's coordinator, and its address; see `jaxddp.job.keeper`.

    Where it does not start, the address is the coordinator's own. Raises: InputError; that is no address.
    """
    host, port = split_address(coordinator)
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_KEEPER), host, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert keeper.stdout is not None
    there, _, _ = select.select([keeper.stdout], [], [], _KEEPER_SECONDS)
    said = keeper.stdout.readline() if there else b""
    return keeper, f"{LOOPBACK}:{int(said)}" if said.strip().isdigit() else coordinator


def _made(number: int, name: str, make: Callable[[], str]) -> Answer:
    try:
        return Answer(number, name, make())
    except (InputError, Unreachable) as error:
        return Answer(number, name, "", error.to_json(), error.exit_code)


def _text(answer: Answer) -> str:
    if answer.error:
        raise error_from(answer.code, answer.error)
    return answer.text
