"""The lock of a work directory. One run at a time holds it, and other processes can query it."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.errors import Option, Unreachable
from jaxddp.core.files import try_lock

LOCK_FILE = ".lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a work directory during the block. Without a lock, a second run would delete files that this run writes.

    The lock ends with the process, which its file names. A file system may have no locks. Raises: Unreachable if
    another run holds the lock: a job that a scheduler starts again may begin before its earlier start has ended.
    """
    # A lock of the directory itself would not reach the server of a network file system.
    with files.readable_errors(directory / LOCK_FILE):
        lock = files.open_regular(directory / LOCK_FILE, "ab")
    with lock:
        if not try_lock(lock):
            # Perhaps only `is_locked` holds the lock, for a moment.
            time.sleep(0.1)
            # The run that held the lock may have removed its directory, and another run may have made a new one.
            if not try_lock(lock) or not os.path.samestat(os.fstat(lock.fileno()), os.stat(directory / LOCK_FILE)):
                holder = files.read(directory / LOCK_FILE).decode(errors="replace") or "an unknown process"
                advice = ("wait for it, or give another ", Option("workdir"))
                raise Unreachable(f"{directory}: another run is writing there ({holder})", advice=advice)
        with suppress(OSError):  # The disk may be full.
            lock.truncate(0)
            os.write(lock.fileno(), f"process {os.getpid()} on {os.uname().nodename}".encode())
        yield


def is_locked(directory: Path) -> bool | None:
    """Return whether a run holds the lock of a directory; None if unknown. No write permission is needed."""
    with suppress(OSError), files.open_regular(directory / LOCK_FILE) as lock:
        try:
            # The lock is shared, so several processes can query it, and is released at once.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    return None
