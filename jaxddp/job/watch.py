"""A process that is lost or stuck ends the job: all processes watch each other, so that none waits without an end.

Process 0 is connected with all others. A killed process closes its connection, a stopped process or machine sends no
more heartbeats, and a process that fails says why before it ends; process 0 passes this on. JAX detects some of this
through a collective that fails or its own heartbeat, but without naming the process, and not always in Python. A
process that is alive but stands still says so with its heartbeats, and process 0 finds the one that others wait for.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jaxddp.core.phases as phases
from jaxddp.core.phases import Standing
from jaxddp.core.wording import on_screen
from jaxddp.job.connection import Connection
from jaxddp.job.messages import Alive, Done, Left, Lost, Message

LONGER = "if it takes that long, raise parallel.stall_timeout"

# A loss is known at once when a connection breaks. A process whose collective fails because of it waits this long for
# the reason; a process that still computes is given as long to fail by itself.
GRACE_SECONDS = 2.0
_WRITING_SECONDS = 1.0


class Waits(NamedTuple):
    """How long a process waits for the others, in seconds.

    Attributes:
        silence: without a sign of life, until one counts as lost.
        stall: without progress, until one counts as stuck; some phases have a multiple, see `jaxddp.core.phases`.
        shutdown: at the end, until all are done.
    """

    silence: float = 10.0
    stall: float = 600.0
    shutdown: float = 60.0

    @property
    def longest(self) -> float:
        """For what another one must do first. One that is stuck was named by then, and ended."""
        return phases.longest(self.stall) + 2 * self.silence


@dataclass(frozen=True)
class Loss:
    """A process that ended before the job did, or stands still: the reason, and the exit code that all others adopt.

    For `stacks` see `jaxddp.job.messages.Lost`.
    """

    process: int
    reason: str
    code: int
    stacks: str = "none"

    def __str__(self) -> str:
        return f"process {self.process} {self.reason}; the job ends here"


class Watch:
    """Knows who is connected, where each stands, who is done, who left, and the first loss, which ends this process.

    Args:
        own: this process's id. Process 0 judges who is stuck.
        connections: of the processes that this one is connected with.
        hosts: the names of their hosts.
        waits: how long this process waits for them.
        end: called with the loss, in the thread of the event loop, once the others are told.
    """

    def __init__(
        self,
        own: int,
        connections: Mapping[int, Connection],
        hosts: Mapping[int, str],
        waits: Waits,
        end: Callable[[Loss], None],
    ):
        self._own, self._connections, self._hosts = own, dict(connections), hosts
        self._waits, self._end = waits, end
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._alive, self._done, self._left = dict[int, Alive](), set[int](), set[int]()
        self.all_done = asyncio.Event()
        self._lost: Loss | None = None
        self._known = threading.Event()
        self._closed = False

    def loss(self, timeout: float = GRACE_SECONDS) -> Loss | None:
        """The process that was lost, if that is known in time. For other threads than that of the event loop."""
        self._known.wait(timeout)
        return self._lost

    @property
    def is_over(self) -> bool:
        """Whether this process is about to end, after a loss or by itself."""
        return self._closed or self._lost is not None

    def close(self) -> None:
        """From here on nobody's end is a loss: this process ends itself."""
        self._closed = True

    def told(self, process: int, message: Message) -> None:
        """A process gave a sign of life, which may say that it ends in order, or who was lost."""
        self._heard[process] = time.monotonic()
        if isinstance(message, Alive):
            self._alive[process] = message
        elif isinstance(message, Lost):
            self.report(Loss(message.process, message.reason, message.code, message.stacks))
        elif isinstance(message, Left):
            self._left.add(process)
        elif isinstance(message, Done):
            self._done.add(process)
            if self._done >= self._connections.keys():
                self.all_done.set()

    def broke(self, process: int) -> None:
        """The connection with a process ended."""
        if process not in self._left:
            self.report(Loss(process, f"was lost{self._on(process)}: its connection broke", 1))

    def report(self, loss: Loss) -> None:
        """Tell the others of the first loss, and end."""
        if self.is_over:
            return
        self._lost = loss
        self.tell(loss)
        if loss.stacks == "all" or (loss.stacks == "own" and loss.process == self._own):
            show_stacks()
        self._known.set()
        self._end(loss)

    def tell(self, loss: Loss) -> None:
        """Process 0 tells all others, also one that is alive but stuck; every other process tells process 0."""
        for connection in self._connections.values():
            connection.send(Lost(loss.process, loss.reason, loss.code, loss.stacks))

    def standings(self) -> dict[int, Alive]:
        """What each process that is connected, and this one, said last of where it stands."""
        return self._alive | {self._own: _alive()}

    async def beat(self) -> None:
        """Give signs of life, and look for those of the others, until this is cancelled."""
        between = min(1.0, self._waits.silence / 4, self._waits.stall / 4)
        while not self._closed:
            begin = time.monotonic()
            own = _alive()
            for connection in self._connections.values():
                connection.send(own)
            await asyncio.sleep(between)
            # A process that was stopped itself, or did not get to run, has heard nobody, and could go nowhere.
            late = time.monotonic() - begin - between
            phases.excuse(late)
            self._find_silent(late)
            if self._own == 0:
                self._find_stuck()

    def _find_silent(self, late: float) -> None:
        now, silence = time.monotonic(), self._waits.silence
        for process in self._connections.keys() - self._left:
            self._heard[process] = min(now, self._heard[process] + late)
            if now - self._heard[process] > silence:
                self.report(Loss(process, f"gave no sign of life for {silence:g} s{self._on(process)}", 1))

    def _find_stuck(self) -> None:
        standings = {process: Standing(each.phase, each.step, each.idle) for process, each in self.standings().items()}
        process = phases.stuck(standings, self._waits.stall)
        if process is not None:
            which = standings[process]
            # Of several that do not say whom they wait for, any may be the cause.
            is_alone = not which.waits and all(own.waits for other, own in standings.items() if other != process)
            stacks, where = ("own", "its log has") if is_alone else ("all", "the log of each process has")
            reason = f"{which}{self._on(process)}; {where} the stacks of its threads; {LONGER}"
            self.report(Loss(process, reason, 1, stacks))

    def _on(self, process: int) -> str:
        host = self._hosts.get(process)
        return f" (on {host})" if host else ""


def _alive() -> Alive:
    """The heartbeat of this process."""
    own = phases.standing()
    return Alive(own.phase, own.step, own.idle, phases.spent())


def end_process(loss: Loss) -> None:
    """End this process soon: the main thread may fail by itself with this reason, and say it."""
    # A normal exit would wait at JAX's shutdown barrier.
    asyncio.get_running_loop().call_later(GRACE_SECONDS, end_now, str(loss), loss.code)


def show_stacks() -> None:
    """Write the stacks of all threads to stderr."""
    # By way of a file: what writes them holds Python's lock, and stderr may be a pipe that nobody empties.
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
        _in_time(lambda: sys.stderr.write(f"the stacks of all threads:\n{stacks}"))


def show_stacks_on_signal() -> None:
    """SIGUSR1 shows the stacks, unless the program has a use of its own for it; also where Python's lock is held."""
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        with contextlib.suppress(OSError, ValueError):  # Of a notebook's stderr, which is no file.
            faulthandler.register(signal.SIGUSR1)


def end_now(line: str, code: int) -> None:
    """Write the line as the last of stderr, and end the process without running exit handlers."""
    _in_time(sys.stdout.flush)
    # In one piece: mpirun mixes what several processes write.
    _in_time(lambda: (sys.stderr.write(f"jaxddp: {on_screen(line)}\n"), sys.stderr.flush()))
    os._exit(code)


def _in_time(write: Callable[[], object]) -> None:
    """Write, but do not wait for a reader that does not read, nor for a thread that does."""
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_WRITING_SECONDS)
