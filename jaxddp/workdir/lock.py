"""The lock of a work directory: one run at a time writes there, and others can see that one does."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.message import Option

LOCK_FILE = ".lock"
_LOOK_SECONDS = 0.1
"""Longer than `is_locked` holds it."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep a second run out of a work directory: its first act would be to clear away what this one is writing.

    Ends with the process, however it ends. On a file system without locks nothing is held. Raises: InputError.
    """
    # Of a file, not of the directory: that lock would never reach the server of a network file system.
    with files.readable_errors(directory / LOCK_FILE):
        lock = files.open_regular(directory / LOCK_FILE, "ab")
    with lock:
        if not took(lock):
            # It may be one who only looks.
            time.sleep(_LOOK_SECONDS)
            # A run that ended meanwhile may have taken its directory away, and another made it anew.
            if not took(lock) or not os.path.samestat(os.fstat(lock.fileno()), os.stat(directory / LOCK_FILE)):
                advice = ("wait for it, or give another ", Option("workdir"))
                raise InputError(f"{directory}: another run is at work there", advice=advice)
        yield


def took(file: BinaryIO) -> bool:
    """Take the lock of an open file until it is closed; False where another has it. Files without locks are free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # A file system without locks.
    return True


def is_locked(directory: Path) -> bool | None:
    """Whether a run is at work in a directory; None where that cannot be known. Needs no permission to write."""
    try:
        with files.open_regular(directory / LOCK_FILE) as lock:
            try:
                # Shared, so that several may look at once; it is given back at once.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except OSError:
        return None
