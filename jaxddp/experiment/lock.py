"""Whose a work directory is: all processes of one run must see it, and no other run may have it."""

import fcntl
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jaxddp.files as files
from jaxddp.errors import InputError
from jaxddp.job.membership import exchange, is_first

LOCK_FILE = ".lock"
_SHARED_SECONDS = 5


def check_shared(directory: Path) -> None:
    """Processes of one job save into one directory; a private one would make Orbax wait for what never comes.

    Raises:
        InputError: a process does not see what process 0 has written there; names it.
    """
    name = exchange("work directory", f".shared-{uuid.uuid4().hex}")[0]
    if is_first():
        files.replace(directory / name, b"")
    exchange("work directory written", "")
    # A network file system may show a new file a little late.
    give_up = time.monotonic() + _SHARED_SECONDS
    while not (seen := (directory / name).exists()) and time.monotonic() < give_up:
        time.sleep(0.1)
    blind = [process for process, saw in enumerate(exchange("work directory seen", str(seen))) if saw != str(True)]
    if is_first():
        files.remove(directory / name)
    if blind:
        raise InputError(
            f"{directory}: process {blind[0]} does not see what process 0 writes there; give a --workdir that all "
            "hosts share"
        )


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep a second run out of a work directory: its first act would be to clear away what this one is writing.

    Ends with the process, however it ends. On a file system without locks nothing is held.

    Raises:
        InputError: another run holds it, or its lock cannot be written.
    """
    if not is_first():
        yield
        return
    # Of a file, not of the directory: that lock would never reach the server of a network file system.
    with files.readable_errors(directory / LOCK_FILE):
        lock = (directory / LOCK_FILE).open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = "wait for it, or give another --workdir"
            raise InputError(f"{directory}: another run is at work there; {advice}") from None
        except OSError:
            pass  # A file system without locks.
        yield
