"""Locks of files, which exclude other processes."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Unreachable
from jaxddp.core.phases import doing, moved

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
def in_turn(path: Path, patience: float, waiting_for: str = "") -> Iterator[bool]:
    """Hold the lock of a file during the block. Yield whether it is held; False after a wait of `patience` seconds.

    The folder of the file is made if it does not exist. The lock ends with the process. If the file cannot be written
    or its file system has no locks, the lock counts as held: every process then does the work itself.

    Args:
        waiting_for: a description of the work of the other process, which is shown during the wait; "" for none.
    """
    try:
        files.create(path.parent)
        lock = files.open_regular(path, "ab")
    except (OSError, InputError, Unreachable):
        yield True
        return
    with lock:
        end = time.monotonic() + patience
        while not (is_held := try_lock(lock)) and time.monotonic() < end:
            with doing(f"waiting for another process, which is {waiting_for}") if waiting_for else nullcontext():
                time.sleep(_RETRY_SECONDS)
            # The other process makes progress, and the watchdog of the job must not stop this process.
            moved()
        yield is_held


@contextmanager
def one_at_a_time(path: Path, patience: float) -> Iterator[None]:
    """Let only one process run the block at a time; see `in_turn`.

    Args:
        patience: the longest wait for the other processes, seconds.

    Raises:
        Unreachable: another process holds the lock for longer.
    """
    with in_turn(path, patience) as is_held:
        if not is_held:
            raise Unreachable(f"{path}: locked by another process for {patience:.0f} s; end it, and start again")
        yield
