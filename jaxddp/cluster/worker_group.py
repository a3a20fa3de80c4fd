"""Watches a group of processes until all end. After the first failure or a signal, the others end in bounded time."""

import contextlib
import math
import selectors
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from jaxddp.cluster.worker import DRAIN_SECONDS, Worker, read_ready
from jaxddp.core.errors import InputError, Preempted
from jaxddp.core.log import say
from jaxddp.wire.messages import ExitCode, Message, Number, Shown

T = TypeVar("T")


def taken(events: "SimpleQueue[T]") -> Iterator[T]:
    """Yield all events in a queue, without waiting."""
    with contextlib.suppress(Empty):
        while True:
            yield events.get_nowait()


@contextlib.contextmanager
def catch_signals() -> Iterator[SimpleQueue[Any]]:
    """Put SIGINT, SIGTERM and SIGHUP into a queue during the block. Call this function in the main thread."""
    events = SimpleQueue[Any]()
    names = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores SIGHUP.
        names.append(signal.SIGHUP)
    before = {name: signal.signal(name, lambda number, _: events.put(signal.Signals(number))) for name in names}
    # With an inherited SIG_IGN for SIGCHLD, the kernel would discard the exit codes of child processes.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield events
    finally:
        for name, handler in before.items():
            signal.signal(name, handler or signal.SIG_DFL)


PREEMPTED, BAD_INPUT = Preempted.exit_code, InputError.exit_code
STOPPED_BEFORE_TRAINING = 128 + signal.SIGTERM
"""The exit code of a process that received SIGTERM before it began to train."""


@dataclass(frozen=True)
class End(Message):
    """How the processes of a machine ended. The launchers of several machines also send it to each other.

    Attributes:
        code: 0 after success; the exit code of the first process that failed, or 128 plus its signal; 75 if the
            processes saved and stopped on request.
        cause: the process that failed, with its exit code; or the signal that the launcher received.
        stop_requested: whether the launcher received a signal.
        user_exit: whether the user's code called exit in a process; a restart would then end in the same way.
        generation: the number of the start of the whole job to which the processes belong.
    """

    code: ExitCode
    cause: Shown
    stop_requested: bool = False
    user_exit: bool = False
    generation: Number = 0


@dataclass(frozen=True)
class Failure(End):
    """The end of the first process that failed on a machine. The other processes of the machine may still run."""


_POLL_SECONDS = 0.02
_SELF_END_SECONDS = 2.0
"""The time after a failure in which the other processes may end by themselves, because their own errors are more
informative than a signal."""
_DEATH_SECONDS = 30.0
"""The time that SIGKILL may take. A process that waits in the kernel for a broken disk or GPU may never end."""


@dataclass
class WorkerGroup:
    """The workers of one machine. `watch` waits for them, and `end` or `close` ends them."""

    grace: float
    """Seconds between SIGTERM and SIGKILL after a failure."""
    save_grace: float
    """Seconds between SIGTERM and SIGKILL after all processes are asked to save and stop."""
    generation: int = 0
    workers: list[Worker] = field(default_factory=list)
    _first_failed: Worker | None = None
    _received_signal: signal.Signals | None = None
    _plan: list[tuple[float, signal.Signals]] = field(default_factory=list)
    _unkillable_after: float = math.inf
    """The time, set when SIGKILL is sent, after which a process that still runs counts as unkillable."""

    def watch(self, events: SimpleQueue[Any]) -> Iterator[Any]:
        """Yield events until all processes have ended; several times a second None, if there is no event.

        The events are those of `events`, except signals, and a `Failure`. A line is printed about each process that
        ends with a nonzero exit code.
        """
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.output, selectors.EVENT_READ, worker.output)
            while self._running() and time.monotonic() < self._unkillable_after:
                read_ready(selector, _POLL_SECONDS)
                yield from self._record_ends()
                for event in taken(events):
                    if isinstance(event, signal.Signals):
                        self._stop_on_signal(event)
                    else:
                        yield event
                yield None
                self._follow_plan()

    def save(self) -> None:
        """Ask all processes to save and stop."""
        if not self._plan:
            self._schedule(0, self.save_grace)

    def stop_with_others(self, *, saved: bool) -> None:
        """End the processes, because the processes of another machine ended. If `saved`, let them save first."""
        if not self._plan:
            self._schedule(self.save_grace if saved else _SELF_END_SECONDS, self.grace)

    def report(self) -> None:
        """Print the first failure and the last lines of that process."""
        if self._first_failed is not None:
            output = self._first_failed.output
            say("\n".join([f"{self._first_failed}; its last lines, all of them in {output.path}:", *output.last_lines]))

    def close(self) -> None:
        """End the processes that still run, and print the last output."""
        deadline = min(time.monotonic() + _DEATH_SECONDS, self._unkillable_after)
        for worker in self.workers:
            worker.end(deadline)
        deadline = time.monotonic() + DRAIN_SECONDS
        for worker in self.workers:
            worker.close(deadline)

    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.code is None]

    def _record_ends(self) -> Iterator[Failure]:
        ended = [worker for worker in self._running() if worker.poll() is not None]
        # If several processes ended at the same time, a process killed by a signal is the most likely cause.
        for worker in sorted(ended, key=lambda worker: ((worker.code or 0) >= 0, worker.rank)):
            worker.output.drain(DRAIN_SECONDS)
            if worker.code == 0:
                continue
            say(str(worker))
            if self._first_failed:
                continue
            if self._received_signal:
                if worker.code == BAD_INPUT:
                    # For example, the disk is full when all processes save. A restart would fail in the same way.
                    self._first_failed = worker
            elif worker.code != PREEMPTED:
                self._first_failed = worker
                self._schedule(_SELF_END_SECONDS, self.grace)
                yield Failure(**vars(self._end_of(worker)))
            elif not self._plan:
                # This process has saved and ended. The other processes were also asked to stop, and may still save.
                self._schedule(self.save_grace, self.grace)

    def _stop_on_signal(self, number: signal.Signals) -> None:
        if self._received_signal is not None and number == signal.SIGINT:
            self._plan = [(time.monotonic(), signal.SIGKILL)]
        elif self._received_signal is None:
            self._received_signal = number
            say(f"jaxddp launch: {number.name}: every process was asked to save and stop; another Ctrl-C kills them")
            self._schedule(0, self.grace if self._first_failed else self.save_grace)

    def _schedule(self, terminate: float, kill: float) -> None:
        now = time.monotonic()
        self._plan = [(now + terminate, signal.SIGTERM), (now + terminate + kill, signal.SIGKILL)]

    def _follow_plan(self) -> None:
        while self._plan and self._plan[0][0] <= time.monotonic():
            _, number = self._plan.pop(0)
            for worker in self._running():
                worker.send(number)
            if number == signal.SIGKILL:
                self._unkillable_after = time.monotonic() + _DEATH_SECONDS

    def end(self) -> End:
        """End the processes that still run, and return how the group ended.

        The code is 0 if all processes ended with 0. After a failure, it is the exit code of the first failure, or 128
        plus its signal. The code is 75 if processes saved and stopped on request, and the others succeeded. After a
        signal to the launcher, it is 128 plus the signal if the signal ended processes, and 2 if a process reported a
        mistake of the user. It is 1 if a process cannot be killed.
        """
        self.close()
        codes, signalled, left = {worker.code for worker in self.workers}, self._received_signal, self._running()
        for worker in left:
            say(f"process {worker.rank}: SIGKILL does not end it; it waits in the kernel (for a disk or GPU?)")
        if self._first_failed is not None:
            return self._end_of(self._first_failed)
        code, cause = max(code or 0 for code in codes), "asked to stop"
        if left:
            code, cause = 1, f"process {left[0].rank}: cannot be killed"
        elif signalled is not None and not codes <= {0, PREEMPTED}:
            code, cause = 128 + signalled, signalled.name
        return End(code, cause, signalled is not None, generation=self.generation)

    def _end_of(self, worker: Worker) -> End:
        # The other processes ended because of this one, so their exit codes do not matter.
        user_exit, code = any(each.has_quit for each in self.workers), worker.code or 0
        # After a signal, the code of a process is negative.
        exit_code = code if code >= 0 else 128 - code
        return End(exit_code, str(worker), self._received_signal is not None, user_exit, self.generation)
