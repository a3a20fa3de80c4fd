"""What the launcher's main thread is told, one thing after the other: signals, and what other launchers say."""

import contextlib
import os
import select
import signal
import time
from collections import deque
from collections.abc import Iterator
from typing import Any


class Inbox:
    """Takes from any thread and from signal handlers; the main thread alone looks into it."""

    def __init__(self) -> None:
        self._things = deque[Any]()
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)

    def fileno(self) -> int:
        """Readable, for a selector, when there is something."""
        return self._reading

    def put(self, thing: object) -> None:
        self._things.append(thing)
        # A full pipe wakes as well, and a closed one has nobody to wake.
        with contextlib.suppress(OSError):
            os.write(self._writing, b"\0")

    def taken(self) -> Iterator[Any]:
        """All that is there, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reading, 4096):
                pass
        while self._things:
            yield self._things.popleft()

    def next(self, until: float | None = None) -> Any | None:
        """The next thing; None where there is none before `until`, of the monotonic clock."""
        while True:
            if self._things:
                return self._things.popleft()
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return None
            # A signal's handler has run by the time that this returns.
            select.select([self._reading], [], [], left)
            with contextlib.suppress(BlockingIOError):
                os.read(self._reading, 4096)

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


@contextlib.contextmanager
def caught_signals() -> Iterator[Inbox]:
    """In the block, SIGINT, SIGTERM and SIGHUP come into an inbox and do nothing else. Main thread only."""
    inbox = Inbox()
    names = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        names.append(signal.SIGHUP)
    before = {name: signal.signal(name, lambda number, _: inbox.put(signal.Signals(number))) for name in names}
    # If a parent ignores SIGCHLD, the kernel reaps ended processes, and their exit codes are lost.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield inbox
    finally:
        for name, handler in before.items():
            signal.signal(name, handler or signal.SIG_DFL)
        inbox.close()
