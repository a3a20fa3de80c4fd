"""Watches a group of processes until all end. After the first failure, it ends the others in bounded time."""

import math
import selectors
import signal
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxddp.cluster.event_queue import EventQueue
from jaxddp.cluster.process_output import Output, say
from jaxddp.cluster.restarts import BAD_INPUT, PREEMPTED, End
from jaxddp.cluster.worker import Worker

_POLL_SECONDS = 0.02
_SELF_END_SECONDS = 2.0
"""The time after a failure in which the other processes may end by themselves, because their own errors are more
informative than a signal."""
_DRAIN_SECONDS = 1.0
_DEATH_SECONDS = 30.0
"""The time that SIGKILL may take. A process that waits in the kernel for a broken disk or GPU may never end."""


class Observer(Protocol):
    """Receives the events that occur while a group is watched."""

    def handle_event(self, event: Any, group: "WorkerGroup") -> None:
        """Handle an event that is not a signal."""
        ...

    def poll(self, group: "WorkerGroup") -> None:
        """Handle due events. This is called several times a second."""
        ...

    def record_failure(self, end: End) -> None:
        """Record the first failure of a process. The other processes may still run."""
        ...


@dataclass
class WorkerGroup:
    """The workers of one machine. `watch` waits for them, and `close` ends them."""

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

    def watch(self, events: EventQueue, observer: Observer) -> End:
        """Wait until all processes have ended. Print a line about each process that ends with a nonzero exit code.

        Args:
            events: the events of this process, such as the signals that it receives.

        Returns:
            How the group ended. The code is 0 if all processes ended with 0. After a failure, it is the exit code of
            the first failure, or 128 plus its signal. The code is 75 if processes saved and stopped on request, and the
            others succeeded. After a signal to the launcher, it is 128 plus the signal if the signal ended processes,
            and 2 if a process reported a mistake of the user. It is 1 if a process cannot be killed.
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
                self._record_ends(observer)
                for event in events.take_all():
                    if isinstance(event, signal.Signals):
                        self._stop_on_signal(event)
                    else:
                        observer.handle_event(event, self)
                observer.poll(self)
                self._follow_plan()
        self.close()
        return self._conclude()

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

    def _record_ends(self, observer: Observer) -> None:
        ended = [worker for worker in self._running() if worker.poll() is not None]
        # If several processes ended at the same time, a process killed by a signal is the most likely cause.
        for worker in sorted(ended, key=lambda worker: ((worker.code or 0) >= 0, worker.rank)):
            worker.output.drain(_DRAIN_SECONDS)
            if worker.code != 0:
                say(str(worker))
                self._stop_after(worker, observer)

    def _stop_after(self, worker: Worker, observer: Observer) -> None:
        if self._first_failed:
            return
        if self._received_signal:
            if worker.code == BAD_INPUT:
                # For example, the disk is full when all processes save. A restart would fail in the same way.
                self._first_failed = worker
        elif worker.code != PREEMPTED:
            self._first_failed = worker
            self._schedule(_SELF_END_SECONDS, self.grace)
            observer.record_failure(self._end_of(worker))
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

    def _conclude(self) -> End:
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
