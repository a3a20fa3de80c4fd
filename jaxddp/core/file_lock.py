"""Locks of files and folders, which exclude other processes."""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Unreachable
from jaxddp.core.phases import doing, moved

_RETRY_SECONDS = 0.1
_log = logging.getLogger("jaxddp.files")


def try_lock(file: BinaryIO | int) -> bool:
    """Lock an open file or folder until it is closed, and return True; False if another process holds the lock.

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


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, which is renamed to `path` if the block succeeds.

    The remains of a process that was killed in the block are removed.

    Raises: InputError if the folder cannot be written, or another process writes it now.
    """
    temporary = files.create(path.parent) / f".{path.name}.tmp"
    with files.readable_errors(path):
        handle = _locked_folder(temporary, path)
        try:
            if remains := [*temporary.iterdir()]:
                _log.warning(f"{temporary}: the remains of an earlier command, which was ended; they are removed")
            for entry in remains:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            yield temporary
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(handle)


def _locked_folder(folder: Path, path: Path) -> int:
    """Create and lock a folder; return its descriptor. Raises: InputError if another process has the lock."""
    while True:
        folder.mkdir(exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        if not try_lock(handle):
            os.close(handle)
            raise InputError(f"{path}: another command is writing there; wait for it, or choose another place")
        # The other process may have renamed the folder before this process locked it.
        if folder.exists() and os.path.samestat(os.fstat(handle), os.stat(folder)):
            return handle
        os.close(handle)
