"""A process that is lost ends the job: all processes watch each other, so that none waits for one that is gone.

Process 0 keeps the connections of the rendezvous. A killed process closes its connection, a stopped process or machine
sends no more heartbeats, and a process that fails says why before it ends; process 0 passes this on. JAX detects some
of this through a collective that fails or its own heartbeat, but without naming the process, and not always in Python.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxddp.job.rendezvous import Meeting, turn_away

# A loss is known at once when a connection breaks. A process whose collective fails because of it waits this long for
# the reason; a process that still computes is given as long to fail by itself.
_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Loss:
    """A process that ended before the job did: the reason, and the exit code that all others adopt."""

    process: int
    reason: str
    code: int

    def __str__(self) -> str:
        return f"process {self.process} {self.reason}; the job ends here"


class Watch:
    """Watches the peers of a meeting until `close`, and ends this process when one of them is lost.

    Args:
        silence: seconds without a heartbeat after which a process counts as lost.
        end: called with the loss, in another thread, in place of ending this process.
    """

    def __init__(self, meeting: Meeting, *, silence: float, end: Callable[[Loss], None] | None = None):
        self._meeting, self._silence = meeting, silence
        self._end = end or _end_process
        self._lost: Loss | None = None
        self._known = threading.Event()
        self._closed = threading.Event()
        self._done: set[int] = set()
        for process in meeting.peers:
            threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        if meeting.server is not None:
            threading.Thread(target=self._turn_away_late, args=(meeting.server,), daemon=True).start()

    def loss(self, timeout: float = _GRACE_SECONDS) -> Loss | None:
        """The process that was lost, if that is known in time."""
        self._known.wait(timeout)
        return self._lost

    def fail(self, reason: str, code: int) -> None:
        """Tell the others that this process fails, and why."""
        self._closed.set()
        self._tell(Loss(self._meeting.job.process_id, reason, code))

    def close(self) -> None:
        """Tell the others that this process ends in order."""
        self._closed.set()
        for peer in self._meeting.peers.values():
            with contextlib.suppress(OSError):
                peer.send(done=True)
        if self._meeting.server is not None:
            self._meeting.server.close()

    def _listen(self, process: int) -> None:
        peer = self._meeting.peers[process]
        while not self._closed.is_set():
            try:
                message = peer.receive(self._silence)
            except TimeoutError:
                return self._report(
                    Loss(process, f"gave no sign of life for {self._silence:g} s{self._on(process)}", 1)
                )
            except (OSError, ValueError):
                message = None
            if message is None:
                return self._report(Loss(process, f"was lost{self._on(process)}: its connection broke", 1))
            if message.get("done"):
                self._done.add(process)
                return None
            if "lost" in message:
                return self._report(Loss(message["lost"], message["reason"], message["code"]))
        return None

    def _beat(self) -> None:
        while not self._closed.wait(min(1.0, self._silence / 4)):
            for process, peer in self._meeting.peers.items():
                if process not in self._done:
                    with contextlib.suppress(OSError):  # `_listen` sees it too, and handles it.
                        peer.send(alive=True)

    def _turn_away_late(self, server: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                turn_away(self._meeting.job, server, timeout=1)
            except OSError:
                return

    def _report(self, loss: Loss) -> None:
        if self._closed.is_set() or self._lost is not None:
            return
        self._lost = loss
        self._tell(loss)
        self._known.set()
        self._end(loss)

    def _tell(self, loss: Loss) -> None:
        """Process 0 tells all others; every other process tells process 0."""
        for process, peer in self._meeting.peers.items():
            if process != loss.process and process not in self._done:
                with contextlib.suppress(OSError):
                    peer.send(lost=loss.process, reason=loss.reason, code=loss.code)

    def _on(self, process: int) -> str:
        host = self._meeting.hosts.get(process)
        return f" (on {host})" if host else ""


def _end_process(loss: Loss) -> None:
    # The main thread may fail by itself with this reason. A normal exit would wait at JAX's shutdown barrier.
    time.sleep(_GRACE_SECONDS)
    end_now(str(loss), loss.code)


def end_now(line: str, code: int) -> None:
    """Write the line as the last of stderr, and end the process without running exit handlers."""
    sys.stdout.flush()
    # In one piece: mpirun mixes what several processes write.
    sys.stderr.write(f"jaxddp: {line}\n")
    sys.stderr.flush()
    os._exit(code)
