"""The events that the launcher's main thread handles one after the other: signals, and news of other launchers."""

import contextlib
import os
import select
import signal
import time
from collections import deque
from collections.abc import Iterator
from typing import Any


class EventQueue:
    """Takes events from any thread and from signal handlers. Only the main thread reads them."""

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
        # If the pipe is full, the reader wakes up anyway. If the pipe is closed, there is no reader.
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
        """Return the next event; None if there is none before `until`, a time of the monotonic clock."""
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
    """In the block, put SIGINT, SIGTERM and SIGHUP into a queue instead of handling them. Main thread only."""
    events = EventQueue()
    names = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores SIGHUP.
        names.append(signal.SIGHUP)
    before = {name: signal.signal(name, lambda number, _: events.put(signal.Signals(number))) for name in names}
    # If this process inherits that SIGCHLD is ignored, the kernel discards the exit codes of its children.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield events
    finally:
        for name, handler in before.items():
            signal.signal(name, handler or signal.SIG_DFL)
        events.close()
