"""A lock for work whose result several processes use: one process does the work, and the others wait for its result."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import jaxddp.core.files as files
from jaxddp.core.phases import doing, moved

_PAUSE = 0.2
"""Seconds between two attempts to take the lock."""


@contextmanager
def in_turn(file: Path, seconds: float, waiting_for: str) -> Iterator[bool]:
    """Hold the lock of a file during the block. Yield whether it is held; False after `seconds` of waiting.

    The lock ends with the process. If the file cannot be written or its file system has no locks, the lock counts as
    held: every process then does the work itself.

    Args:
        waiting_for: a description of the work of the other process, which is shown to the user during the wait.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = files.open_regular(file, "ab")
    except OSError:
        yield True
        return
    with lock:
        until = time.monotonic() + seconds
        is_held = _try_lock(lock)
        while not is_held and time.monotonic() < until:
            with doing(f"waiting for another process, which is {waiting_for}"):
                time.sleep(_PAUSE)
            # The other process makes progress, and the watchdog of the job must not stop this process.
            moved()
            is_held = _try_lock(lock)
        yield is_held


def _try_lock(lock: BinaryIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # A file system without locks.
    return True
