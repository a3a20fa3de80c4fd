"""A process that is lost ends the job: all processes watch each other, so that none waits for one that is gone.

Process 0 is connected with all others. A killed process closes its connection, a stopped process or machine sends no
more heartbeats, and a process that fails says why before it ends; process 0 passes this on. JAX detects some of this
through a collective that fails or its own heartbeat, but without naming the process, and not always in Python.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxddp.job.connection import Connection
from jaxddp.job.messages import Alive, Done, Lost, Message

# A loss is known at once when a connection breaks. A process whose collective fails because of it waits this long for
# the reason; a process that still computes is given as long to fail by itself.
GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Loss:
    """A process that ended before the job did: the reason, and the exit code that all others adopt."""

    process: int
    reason: str
    code: int

    def __str__(self) -> str:
        return f"process {self.process} {self.reason}; the job ends here"


class Watch:
    """Knows who is connected, who is done, and who was lost first, which ends this process.

    Args:
        connections: of the processes that this one is connected with.
        hosts: the names of their hosts.
        silence: seconds without a word after which a process counts as lost.
        end: called with the loss, in the thread of the event loop, once the others are told.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
        hosts: Mapping[int, str],
        silence: float,
        end: Callable[[Loss], None],
    ):
        self._connections, self._hosts, self._silence, self._end = dict(connections), hosts, silence, end
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._lost: Loss | None = None
        self._known = threading.Event()
        self._closed = False

    def loss(self, timeout: float = GRACE_SECONDS) -> Loss | None:
        """The process that was lost, if that is known in time. For other threads than that of the event loop."""
        self._known.wait(timeout)
        return self._lost

    def close(self) -> None:
        """From here on nobody's end is a loss: this process ends itself."""
        self._closed = True

    def told(self, process: int, message: Message) -> None:
        """A process gave a sign of life, which may say that it ends in order, or who was lost."""
        self._heard[process] = time.monotonic()
        if isinstance(message, Lost):
            self.report(Loss(message.process, message.reason, message.code))
        elif isinstance(message, Done):
            self._connections.pop(process, None)

    def broke(self, process: int) -> None:
        """The connection with a process ended."""
        self.report(Loss(process, f"was lost{self._on(process)}: its connection broke", 1))

    def report(self, loss: Loss) -> None:
        """Tell the others of the first loss, and end."""
        if self._closed or self._lost is not None:
            return
        self._lost = loss
        self.tell(loss)
        self._known.set()
        self._end(loss)

    def tell(self, loss: Loss) -> None:
        """Process 0 tells all others; every other process tells process 0."""
        for process, connection in self._connections.items():
            if process != loss.process:
                connection.send(Lost(loss.process, loss.reason, loss.code))

    async def beat(self) -> None:
        """Give signs of life, and look for those of the others, until this is cancelled."""
        between = min(1.0, self._silence / 4)
        while not self._closed:
            begin = time.monotonic()
            for connection in self._connections.values():
                connection.send(Alive())
            await asyncio.sleep(between)
            # A process that was stopped itself, or did not get to run, has heard nobody.
            now = time.monotonic()
            late = now - begin - between
            for process in list(self._connections):
                self._heard[process] = min(now, self._heard[process] + late)
                if now - self._heard[process] > self._silence:
                    self.report(Loss(process, f"gave no sign of life for {self._silence:g} s{self._on(process)}", 1))

    def _on(self, process: int) -> str:
        host = self._hosts.get(process)
        return f" (on {host})" if host else ""


def end_process(loss: Loss) -> None:
    """End this process soon: the main thread may fail by itself with this reason, and say it."""
    # A normal exit would wait at JAX's shutdown barrier.
    asyncio.get_running_loop().call_later(GRACE_SECONDS, end_now, str(loss), loss.code)


def end_now(line: str, code: int) -> None:
    """Write the line as the last of stderr, and end the process without running exit handlers."""
    sys.stdout.flush()
    # In one piece: mpirun mixes what several processes write.
    sys.stderr.write(f"jaxddp: {line}\n")
    sys.stderr.flush()
    os._exit(code)
