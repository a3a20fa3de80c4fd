"""Reads and writes files without blocking, replaces files atomically, and raises errors that a user can act on."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from jaxddp.core.errors import InputError, Unreachable, refused
from jaxddp.core.message import Words
from jaxddp.core.wording import show

_AWAY = frozenset(
    {
        *(errno.ESTALE, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTDOWN),
        *(errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN, errno.ESHUTDOWN),
    }
)
"""Error numbers of a file server that does not answer. The file itself may be intact."""
_LONGEST_NAME = 255
"""The maximum length of a file name in bytes, in nearly every file system."""
_SERVER_ADVICE = "check the disk or its server, and start again"
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}


@contextlib.contextmanager
def readable_errors(path: Path) -> Iterator[None]:
    """Turn an OSError in the block (disk full, read-only, a file instead of a directory) into an InputError.

    An error of a failing disk or server becomes an `Unreachable`.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, TimeoutError) and error.errno is None:
            raise  # This is the time limit of a wait for another process, not an error of a file.
        if error.errno in _AWAY or error.errno == errno.EIO:
            raise Unreachable(f"{path}: cannot be written ({error.strerror}); {_SERVER_ADVICE}") from error
        reason = error.strerror or type(error).__name__
        advice = "free some space there" if reason == os.strerror(errno.ENOSPC) else "choose another place"
        raise InputError(f"{path}: cannot be written ({reason}); {advice}") from error


@contextlib.contextmanager
def reading(where: Path | str, advice: Words, *, missing: Words | None = None) -> Iterator[None]:
    """Turn an OSError in the block into an InputError about `where`. `missing` is the message for a missing file."""
    try:
        yield
    except OSError as error:
        if missing is not None and isinstance(error, FileNotFoundError):
            raise InputError(f"{where}: ", missing) from None
        raise InputError(f"{where}: cannot be read ({error.strerror})", advice=advice) from None


def check_server(where: Path, error: OSError) -> None:
    """Raise `Unreachable` if a read error comes from the file server, and not from the file."""
    if error.errno in _AWAY:
        raise Unreachable(f"{where}: cannot be read ({error.strerror}); {_SERVER_ADVICE}") from error


def check_path(path: Any, name: str) -> str | os.PathLike[str]:
    """Check an argument that is a path (text or a path object), and return it. The path need not exist.

    Raises:
        InputError: the argument is no path, or the operating system does not allow such a path.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise refused(name, path, "expected a path")
    try:
        os.stat(text)
        reason = None
    except FileNotFoundError:
        # A part of a URL may be longer than a file name.
        long = "://" not in text and any(len(os.fsencode(part)) > _LONGEST_NAME for part in Path(text).parts)
        reason = os.strerror(errno.ENAMETOOLONG) if long else None
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        shown = text if len(text) <= _LONGEST_NAME else show(text)
        raise InputError(f"{shown}: cannot be used as a path ({reason}); choose another")
    return path


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home directory in place of a leading `~` or `~user`; unchanged if there is none."""
    return Path(os.path.expanduser(path))


def open_regular(path: str | os.PathLike[str], mode: Literal["rb", "ab", "wb"] = "rb", buffering: int = -1) -> Any:
    """Open a regular file, like `open`. Other files are errors: reading a FIFO blocks, and some devices have no end.

    Raises:
        OSError: `open` raised it, or the file is not regular. In the second case `strerror` is the type of the file.
    """
    return open(path, mode, buffering=buffering, opener=_regular_opener)


def read(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file. Raises: see `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def parse_json(content: bytes | str, kind: type = object) -> Any:
    """Parse the JSON of a file, which may be damaged.

    Raises: ValueError, with the reason, if the content is no JSON, is nested too deeply, or is not of the type `kind`.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, kind):
        raise ValueError(f"it holds {show(value)}")
    return value


def _regular_opener(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK, 0o666)
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'a device')}, not a regular file", path)
    return handle


def create(path: Path) -> Path:
    """Create a directory and its missing parents, and return the directory. Raises: InputError."""
    with readable_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def check_out(path: Path) -> Path:
    """Check the path of an output file, and return it with links resolved. Call this before the work begins.

    Raises: InputError if the path is a folder or not a regular file, or its parent folder does not exist.
    """
    place = Path(os.path.realpath(path))
    if place.is_dir():
        raise InputError(f"{path}: is a folder; give the name of a file")
    if place.exists() and not place.is_file():
        raise InputError(f"{path}: is not a regular file; give the name of one")
    if not place.parent.is_dir():
        raise InputError(f"{path}: cannot be written (No such file or directory); choose another place")
    return place if path.is_symlink() else path


def append(path: Path, data: bytes) -> None:
    """Append bytes to a file and flush them to the operating system. Raises: InputError."""
    # The file is closed after each write, so that no bytes remain in a buffer if the process is killed.
    with readable_errors(path), open_regular(path, "ab") as file:
        file.write(data)


def replace(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a whole file atomically, from bytes or an iterable of bytes.

    Readers see the previous content until all bytes are on the disk. Raises: InputError.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with readable_errors(path):
        try:
            with open_regular(temporary, "wb") as file:
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
    """Remove a file, if it exists. Raises: InputError."""
    with readable_errors(path):
        path.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    # A rename survives a power cut after the directory is synced. Some network file systems cannot sync a directory.
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
