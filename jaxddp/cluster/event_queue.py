"""The queue of events that the launcher's main thread handles: signals, and events of other launchers."""

import contextlib
import os
import select
import signal
import time
from collections import deque
from collections.abc import Iterator
from typing import Any


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
