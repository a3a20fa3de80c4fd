"""Files of a work directory: a reader finds each of them whole, and a write that fails is one line for the user."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path

from jaxddp.errors import InputError


@contextlib.contextmanager
def readable_errors(path: Path) -> Iterator[None]:
    """Turns an OSError in the block (disk full, read-only, a file where a directory should be) into an InputError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TimeoutError) and error.errno is None:
            raise  # Of a wait for another process, not of a file.
        reason = error.strerror or type(error).__name__
        advice = "free some space there" if reason == os.strerror(errno.ENOSPC) else "choose another place"
        raise InputError(f"{path}: cannot be written ({reason}); {advice}") from error


def open_regular(path: Path) -> BufferedReader:
    """Opens a file for reading. Raises: OSError; also where it is something else, such as a pipe that nobody feeds."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read(path: Path) -> bytes:
    """The bytes of a regular file. Raises: OSError."""
    with open_regular(path) as file:
        return file.read()


def create(path: Path) -> Path:
    """Makes the directory and its parents, and returns it; one that exists already is fine. Raises: InputError."""
    with readable_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def append(path: Path, data: bytes) -> None:
    """Adds bytes to the end of a file and hands them to the operating system. Raises: InputError."""
    # The file is closed again at once: nothing waits in a buffer if the process is killed.
    with readable_errors(path), path.open("ab") as file:
        file.write(data)


def replace(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Writes a whole file, of bytes or of parts that are made as they are written.

    Until its bytes have reached the disk, readers see what was there. Raises: InputError.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with readable_errors(path):
        try:
            with temporary.open("wb") as file:
                file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_directory(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def remove(path: Path) -> None:
    """Removes a file, if it is there. Raises: InputError."""
    with readable_errors(path):
        path.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    # A rename survives a power cut only once the directory is on disk; some network file systems refuse to sync one.
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
