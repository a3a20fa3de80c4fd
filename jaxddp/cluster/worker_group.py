"""Watches a group of processes until all end. After the first failure or a signal, the others end in bounded time."""

import contextlib
import math
import os
import select
import selectors
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxddp.cluster.worker import Output, Worker
from jaxddp.core.errors import InputError, Preempted
from jaxddp.core.log import say


class EventQueue:
    """A queue to which any thread and any signal handler may add events. Only the main thread reads events."""

    def __init__(self) -> None:
        self._events = deque[Any]()
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)

    def fileno(self) -> int:
        """Return a file descriptor that a selector can wait for."""
        return self._reading

    def put(self, event: object) -> None:
        """Add an event."""
        self._events.append(event)
        # If the pipe is full, the reader wakes up without this byte. If the pipe is closed, there is no reader.
        with contextlib.suppress(OSError):
            os.write(self._writing, b"\0")

    def take_all(self) -> Iterator[Any]:
        """Yield all events in the queue, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reading, 4096):
                pass
        while self._events:
            yield self._events.popleft()

    def next(self, until: float | None = None) -> Any | None:
        """Return the next event; None if no event arrives before `until`, a time of the monotonic clock."""
        while True:
            if self._events:
                return self._events.popleft()
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return None
            # If a signal interrupts `select`, the handler of the signal runs before `select` returns.
            select.select([self._reading], [], [], left)
            with contextlib.suppress(BlockingIOError):
                os.read(self._reading, 4096)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._reading)
        os.close(self._writing)


@contextlib.contextmanager
def catch_signals() -> Iterator[EventQueue]:
    """Put SIGINT, SIGTERM and SIGHUP into a queue during the block. Call this function in the main thread."""
    events = EventQueue()
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
        events.close()


PREEMPTED, BAD_INPUT = Preempted.exit_code, InputError.exit_code
STOPPED_BEFORE_TRAINING = 128 + signal.SIGTERM
"""The exit code of a process that received SIGTERM before it began to train."""


@dataclass(frozen=True)
class End:
    """How the processes of a machine ended.

    Attributes:
        code: 0 after success; the exit code of the first process that failed, or 128 plus its signal; 75 if the
            processes saved and stopped on request.
        cause: the process that failed, with its exit code; or the signal that the launcher received.
        stop_requested: whether the launcher received a signal.
        user_exit: whether the user's code called exit in a process; a restart would then end in the same way.
    """

    code: int
    cause: str
    stop_requested: bool = False
    user_exit: bool = False


_POLL_SECONDS = 0.02
_SELF_END_SECONDS = 2.0
"""The time after a failure in which the other processes may end by themselves, because their own errors are more
informative than a signal."""
_DRAIN_SECONDS = 1.0
_DEATH_SECONDS = 30.0
"""The time that SIGKILL may take. A process that waits in the kernel for a broken disk or GPU may never end."""


@dataclass
class WorkerGroup:
    """The workers of one machine. `watch` waits for them, and `end` or `close` ends them."""

    grace: float
    """Seconds between SIGTERM and SIGKILL after a failure."""
    save_grace: float
    """Seconds between SIGTERM and SIGKILL after all processes are asked to save and stop."""
    workers: list[Worker] = field(default_factory=list)
    _first_failed: Worker | None = None
    _received_signal: signal.Signals | None = None
    _plan: list[tuple[float, signal.Signals]] = field(default_factory=list)
    _unkillable_after: float = math.inf
    """The time, set when SIGKILL is sent, after which a process that still runs counts as unkillable."""

    def watch(self, events: EventQueue) -> Iterator[Any]:
        """Yield events until all processes have ended; several times a second None, if there is no event.

        The events are those of `events`, except signals, and the `End` of the first process that fails while the others
        may still run. A line is printed about each process that ends with a nonzero exit code.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(events, selectors.EVENT_READ)
            for worker in self.workers:
                selector.register(worker.output, selectors.EVENT_READ, worker.output)
            while self._running() and time.monotonic() < self._unkillable_after:
                for key, _ in selector.select(_POLL_SECONDS):
                    output: Output | None = key.data
                    if output is not None:
                        output.read()
                        if output.has_ended:
                            selector.unregister(output)
                yield from self._record_ends()
                for event in events.take_all():
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
        # Only a process that left its group can still hold the pipe open.
        deadline = time.monotonic() + _DRAIN_SECONDS
        for worker in self.workers:
            while not worker.output.has_ended and time.monotonic() < deadline:
                if not worker.output.read():
                    time.sleep(_POLL_SECONDS)
            worker.output.close()
            worker.status.close()

    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.code is None]

    def _record_ends(self) -> Iterator[End]:
        ended = [worker for worker in self._running() if worker.poll() is not None]
        # If several processes ended at the same time, a process killed by a signal is the most likely cause.
        for worker in sorted(ended, key=lambda worker: ((worker.code or 0) >= 0, worker.rank)):
            worker.output.drain(_DRAIN_SECONDS)
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
                yield self._end_of(worker)
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
        codes = {worker.code for worker in self.workers}
        stop_requested, left = self._received_signal is not None, self._running()
        for worker in left:
            say(f"process {worker.rank}: SIGKILL does not end it; it waits in the kernel (for a disk or GPU?)")
        if self._first_failed is not None:
            return self._end_of(self._first_failed)
        if left:
            return End(1, f"process {left[0].rank}: cannot be killed", stop_requested)
        if codes <= {0, PREEMPTED}:
            return End(max(code or 0 for code in codes), "asked to stop", stop_requested)
        assert self._received_signal is not None
        return End(_exit_code(-self._received_signal), self._received_signal.name, stop_requested)

    def _end_of(self, worker: Worker) -> End:
        # The other processes ended because of this one, so their exit codes do not matter.
        user_exit = any(each.has_quit for each in self.workers)
        return End(_exit_code(worker.code or 0), str(worker), self._received_signal is not None, user_exit)


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code
