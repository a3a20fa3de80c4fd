"""Locks of files, which exclude other processes."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Unreachable
from jaxddp.core.phases import moved

_RETRY_SECONDS = 0.1


def try_lock(file: BinaryIO) -> bool:
    """Lock an open file until it is closed, and return True; False if another process holds it.

    Returns True on a file system without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # A file system without locks.
    return True


@contextmanager
def one_at_a_time(path: Path, patience: float) -> Iterator[None]:
    """Let only one process run the block at a time, by the lock of a file. Its folder is made if it does not exist.

    The lock ends with the process that holds it. If the file cannot be written, nothing is locked.

    Args:
        patience: the longest wait for the other processes, seconds.

    Raises:
        Unreachable: another process holds the lock for longer.
    """
    try:
        files.create(path.parent)
        lock = files.open_regular(path, "ab")
    except (OSError, InputError):
        yield
        return
    with lock:
        end = time.monotonic() + patience
        while not try_lock(lock):
            if time.monotonic() > end:
                raise Unreachable(f"{path}: locked by another process for {patience:.0f} s; end it, and start again")
            moved()
            time.sleep(_RETRY_SECONDS)
        yield
