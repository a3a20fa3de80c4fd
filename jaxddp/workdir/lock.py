"""The lock of a work directory. One run at a time holds it, and other processes can query it."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Option
from jaxddp.core.files import try_lock

LOCK_FILE = ".lock"
_RETRY_SECONDS = 0.1
"""Seconds until a second attempt; longer than `is_locked` holds the lock."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a work directory during the block. Without a lock, a second run would delete files that this run writes.

    The lock ends with the process. A file system may have no locks. Raises: InputError if another run holds the lock.
    """
    # A lock of the directory itself would not reach the server of a network file system.
    with files.readable_errors(directory / LOCK_FILE):
        lock = files.open_regular(directory / LOCK_FILE, "ab")
    with lock:
        if not try_lock(lock):
            # Perhaps only `is_locked` holds the lock.
            time.sleep(_RETRY_SECONDS)
            # The run that held the lock may have removed its directory, and another run may have made a new one.
            if not try_lock(lock) or not os.path.samestat(os.fstat(lock.fileno()), os.stat(directory / LOCK_FILE)):
                advice = ("wait for it, or give another ", Option("workdir"))
                raise InputError(f"{directory}: another run is writing there", advice=advice)
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
