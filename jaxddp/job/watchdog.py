"""The watchdog ends a job when a process is lost or stuck. Otherwise the other processes would wait forever.

Process 0 is connected to all others. The connection of a killed process closes. A stopped process or machine sends no
more heartbeats. A process that fails sends the reason before it ends. Process 0 sends each loss to all others. JAX
detects some losses, through a failing collective or its own heartbeat. But JAX does not name the process, and does not
always raise a Python exception. The heartbeats include the progress of each process, from which process 0 determines
the stuck process. A process outside a job has a separate watchdog (`jaxddp.core.process_exit.watch_alone`).
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jaxddp.core.phases as phases
from jaxddp.core.process_exit import STALL_ADVICE, end_now, show_stacks
from jaxddp.job.connection import Connection
from jaxddp.job.messages import Elapsed, ExitCode, Message, Number, Shown

_BEAT_SECONDS = 1.0

# A process whose collective fails waits up to this time for the reason of the loss. A process that still computes after
# a loss has the same time to fail by itself.
GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Alive(Message):
    """A heartbeat, with the progress of the sender and its seconds in each phase; see `jaxddp.core.phases`."""

    phase: Shown = phases.OUTSIDE
    step: Number = 0
    idle: Elapsed = 0.0
    spent: dict[str, Elapsed] = field(default_factory=dict)


@dataclass(frozen=True)
class Done(Message):
    """The sender is done. It ends when all processes are done."""


@dataclass(frozen=True)
class Left(Message):
    """The sender closes its connection cleanly, which is not a loss."""


@dataclass(frozen=True)
class Lost(Message):
    """A process ended before the job did, or made no progress. All other processes end with its exit code.

    `stacks` selects the processes that first write the stacks of their threads: "none", "own" (the lost process) or
    "all".
    """

    process: Number
    reason: Shown
    code: ExitCode
    stacks: str = "none"

    def __str__(self) -> str:
        return f"process {self.process} {self.reason}; the job ends here"


class Timeouts(NamedTuple):
    """The time limits for other processes, in seconds.

    Attributes:
        start: the time until all processes have joined.
        silence: the time without a heartbeat after which a process counts as lost.
        stall: the time without progress after which a process counts as stuck. The limit of some phases is a multiple
            of `stall`; see `jaxddp.core.phases`.
        shutdown: the time that a process waits at its end until all processes are done.
    """

    start: float = 60.0
    silence: float = 10.0
    stall: float = 600.0
    shutdown: float = 60.0

    @property
    def longest(self) -> float:
        """The longest wait for a message of another process. The watchdog ends a job with a stuck process sooner."""
        return phases.longest(self.stall) + 2 * self.silence


@dataclass(eq=False)
class Watchdog:
    """Sends heartbeats, records the state of each connected process, and ends this process after the first loss.

    Attributes:
        process_id: the id of this process. Only process 0 detects stuck processes.
        connections: the connections, by process id.
        hosts: the name of each process's host.
        timeouts: how long this process waits for the others.
        end: called with the loss, in the thread of the event loop, after the loss was sent to the others.
        all_done: whether all other processes are done.
    """

    process_id: int
    connections: Mapping[int, Connection]
    hosts: Mapping[int, str]
    timeouts: Timeouts
    end: Callable[[Lost], None]

    def __post_init__(self) -> None:
        self._last_received = dict.fromkeys(self.connections, time.monotonic())
        self._alive, self._done, self._left = dict[int, Alive](), set[int](), set[int]()
        self.all_done = asyncio.Event()
        self._loss: Lost | None = None
        self._loss_event = threading.Event()
        self._closed = False
        self._beating = asyncio.ensure_future(self._beat())

    def loss(self, timeout: float = GRACE_SECONDS) -> Lost | None:
        """Wait for a loss, and return the first one, if any. Do not call this in the event loop."""
        self._loss_event.wait(timeout)
        return self._loss

    @property
    def is_over(self) -> bool:
        """Whether this process is ending, because of a loss or because `close` was called."""
        return self._closed or self._loss is not None

    def close(self) -> None:
        """Stop reporting losses, because this process ends."""
        self._closed = True

    def receive(self, process: int, message: Message) -> None:
        """Record a message of a process. Every message counts as a heartbeat."""
        self._last_received[process] = time.monotonic()
        if isinstance(message, Alive):
            self._alive[process] = message
        elif isinstance(message, Lost):
            self.report(message)
        elif isinstance(message, Left):
            self._left.add(process)
        elif isinstance(message, Done):
            self._done.add(process)
            if self._done >= self.connections.keys():
                self.all_done.set()

    def record_disconnection(self, process: int) -> None:
        """Record that the connection to a process ended."""
        if process not in self._left:
            self.report(Lost(process, f"was lost (on {self.hosts[process]}): its connection broke", 1))

    def report(self, loss: Lost) -> None:
        """Send a loss to the other processes, and end this process. Later losses are ignored."""
        if self.is_over:
            return
        self._loss = loss
        # Process 0 is connected to all others, and they only to process 0. Even a stuck process gets the loss.
        for connection in self.connections.values():
            connection.send(loss)
        if loss.stacks == "all" or (loss.stacks == "own" and loss.process == self.process_id):
            show_stacks()
        self._loss_event.set()
        self.end(loss)

    def heartbeats(self) -> dict[int, Alive]:
        """Return the last heartbeat of each connected process, and a new heartbeat of this process."""
        return self._alive | {self.process_id: _heartbeat()}

    async def _beat(self) -> None:
        """Send heartbeats, and check the heartbeats of the others."""
        interval = min(_BEAT_SECONDS, self.timeouts.silence / 4, self.timeouts.stall / 4)
        while not self._closed:
            begin = time.monotonic()
            heartbeat = _heartbeat()
            for connection in self.connections.values():
                connection.send(heartbeat)
            await asyncio.sleep(interval)
            # While this process was stopped or waited for a core, it could neither receive messages nor make progress.
            delay = time.monotonic() - begin - interval
            phases.subtract_idle(delay)
            self._report_silent(delay)
            if self.process_id == 0:
                self._report_stuck()

    def _report_silent(self, delay: float) -> None:
        now, silence = time.monotonic(), self.timeouts.silence
        for process in self.connections.keys() - self._left:
            self._last_received[process] = min(now, self._last_received[process] + delay)
            if now - self._last_received[process] > silence:
                self.report(Lost(process, f"gave no sign of life for {silence:g} s (on {self.hosts[process]})", 1))

    def _report_stuck(self) -> None:
        found = {process: phases.Progress(one.phase, one.step, one.idle) for process, one in self.heartbeats().items()}
        process = phases.stuck(found, self.timeouts.stall)
        if process is not None:
            stuck = found[process]
            # If several processes are not waiting for others, each of them may be the cause.
            is_alone = not stuck.waits and all(one.waits for other, one in found.items() if other != process)
            stacks, logs = ("own", "its log has") if is_alone else ("all", "the log of each process has")
            reason = f"{stuck} (on {self.hosts[process]}); {logs} the stacks of its threads; {STALL_ADVICE}"
            self.report(Lost(process, reason, 1, stacks))


def _heartbeat() -> Alive:
    return Alive(*phases.progress(), phases.spent())


def end_process(loss: Lost) -> None:
    """End this process after `GRACE_SECONDS`, in which the main thread may fail because of the loss, and report it."""
    # A normal exit would wait at JAX's shutdown barrier.
    asyncio.get_running_loop().call_later(GRACE_SECONDS, end_now, str(loss), loss.code)
