"""Reads, replaces and locks files and folders, and raises errors that a user can act on. No read or write blocks."""

import csv
import errno
import fcntl
import io
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from jaxddp.core.errors import InputError, Option, Unreachable, Words, appearance, nearest, refused, show
from jaxddp.core.phases import doing, moved

CACHE_VARIABLE = "JAXDDP_CACHE"
"""Environment variable for the path of the cache folder. The default is `jaxddp` in XDG_CACHE_HOME or ~/.cache."""
_AWAY = {errno.ESTALE, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH}
_AWAY |= {errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN, errno.ESHUTDOWN, getattr(errno, "EREMOTEIO", errno.ESTALE)}
"""Error numbers of a file server that does not answer. The file itself may be intact."""
_LONGEST_NAME = 255
"""The maximum length of a file name in bytes, in nearly every file system."""
_SERVER_ADVICE = "check the disk or its server, and start again"
_RETRY_SECONDS = 0.1
NO_TEXT = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""Characters that no path and no text of a setting can have. U+DC80 to U+DCFF stand for bytes that are not UTF-8."""
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}

_log = logging.getLogger("jaxddp.files")


@contextmanager
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
        reason = "a symbolic link" if error.errno == errno.ELOOP else error.strerror or type(error).__name__
        advice = "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose another place"
        raise InputError(f"{path}: cannot be written ({reason}); {advice}") from error


@contextmanager
def reading(where: Path | str, advice: Words, *, missing: Words | None = None) -> Iterator[None]:
    """Turn an OSError in the block into an error about `where`; see `check_server`.

    `missing` is the message for a missing file.
    """
    try:
        yield
    except OSError as error:
        if missing is not None and isinstance(error, FileNotFoundError):
            raise InputError(f"{where}: ", missing) from None
        check_server(where, error)
        raise InputError(f"{where}: cannot be read ({error.strerror})", advice=advice) from None


def current_directory() -> Path:
    """Return the current directory. Raises: InputError if it was removed."""
    with reading("the current directory", "go to another one"):
        return Path.cwd()


def check_server(where: Path | str, error: OSError) -> None:
    """Raise `Unreachable` if a read error comes from the file server, and not from the file."""
    if error.errno in _AWAY:
        raise Unreachable(f"{where}: cannot be read ({error.strerror}); {_SERVER_ADVICE}") from error


def check_path(path: Any, name: str, *, in_utf8: bool = False) -> str | os.PathLike[str]:
    """Check an argument that is a path (text or a path object), and return it `expanded`. The path need not exist.

    Raises:
        InputError: the argument is no path, the operating system does not allow such a path, or a place to write to
            is a URL or not `in_utf8`, which TensorStore needs.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or NO_TEXT.search(text):
        raise refused(name, path, "expected a path")
    scheme, separator, _ = text.partition(":/")
    if in_utf8 and separator and scheme.isalnum():
        raise refused(name, text, "is a URL, and files are written to this machine only; give a path, as of a mount")
    text = os.path.expanduser(text)
    # Under another encoding of file names, TensorStore would write to another path.
    if in_utf8 and os.fsencode(full := os.path.abspath(text)) != full.encode(errors="replace"):
        raise InputError(f"{show(full)}: the path is not UTF-8; choose another, or set PYTHONUTF8=1")
    try:
        with suppress(FileNotFoundError):
            os.stat(text)
    except OSError as error:
        shown = text if len(text) <= _LONGEST_NAME else show(text)
        raise InputError(f"{shown}: cannot be used as a path ({error.strerror}); choose another") from None
    return text if isinstance(path, str) else Path(text)


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home directory in place of a leading `~` or `~user`; unchanged if there is none."""
    return Path(os.path.expanduser(path))


def open_regular(path: str | os.PathLike[str], mode: Literal["rb", "ab", "wb"] = "rb", buffering: int = -1) -> Any:
    """Open a regular file, like `open`. Other files are errors: reading a FIFO blocks, and some devices have no end.

    Raises:
        OSError: `open` raised it, the file is not regular (then `strerror` is its type), or it is a link and written.
    """
    return open(path, mode, buffering=buffering, opener=_regular_opener)


def read(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file. Raises: see `open_regular`."""
    handle = _regular_opener(os.fspath(path), os.O_RDONLY)
    # For small files, a file object would take most of the time.
    try:
        size = os.fstat(handle).st_size
        data = os.read(handle, size + 1)
        return data if len(data) == size else b"".join([data, *iter(lambda: os.read(handle, 1 << 20), b"")])
    finally:
        os.close(handle)


def content_of(path: str | os.PathLike[str], advice: Words, *, missing: Words | None = None) -> bytes:
    """Read a regular file. Raises: InputError about the path, with `advice`; see `reading`."""
    with reading(os.fspath(path), advice, missing=missing):
        return read(path)


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


@contextmanager
def parsing(path: Path, advice: Words, fault: str = "is damaged") -> Iterator[None]:
    """Turn an error of content that lacks an entry or has other types into an `InputError` about the file at `path`."""
    try:
        yield
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: {fault} ({error})", advice=advice) from None


def _regular_opener(path: str, flags: int) -> int:
    # In a downloaded folder, a link may lead to any file of the user. So nothing is written through a link.
    handle = os.open(path, flags | os.O_NONBLOCK | (os.O_NOFOLLOW if flags & os.O_WRONLY else 0), 0o666)
    try:
        _check_regular(os.fstat(handle), path)
    except OSError:
        os.close(handle)
        raise
    return handle


def _check_regular(state: os.stat_result, path: str | Path) -> None:
    if (kind := stat.S_IFMT(state.st_mode)) != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'a device')}, not a regular file", path)


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
    if place.exists() and not place.is_file():
        kind = "a folder" if place.is_dir() else "not a regular file"
        raise InputError(f"{path}: is {kind}; give the name of a file")
    if not place.parent.is_dir():
        raise InputError(f"{path}: cannot be written (No such file or directory); choose another place")
    return place if path.is_symlink() else path


def append(path: Path, data: bytes) -> None:
    """Append bytes to a file and flush them to the operating system. Raises: InputError."""
    # The file is closed after each write, so that no bytes remain in a buffer if the process is killed.
    with readable_errors(path), open_regular(path, "ab") as file:
        file.write(data)


def replace(path: Path, data: bytes | Iterable[bytes] | Callable[[BinaryIO], Any]) -> None:
    """Write a whole file atomically: bytes, an iterable of bytes, or what a function writes into the open file.

    Readers see the previous content until all bytes are on the disk. Raises: InputError, also for a path that is not a
    regular file: a rename would remove a device such as /dev/null.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with readable_errors(path):
        with suppress(FileNotFoundError):
            _check_regular(path.stat(), path)
        try:
            with open_regular(temporary, "wb") as file:
                if callable(data):
                    data(file)
                else:
                    file.writelines([data] if isinstance(data, bytes) else data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_directory(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def replace_folder(folder: Path, contents: Mapping[str, bytes], *, replaces_others: bool) -> None:
    """Write files by their paths below a folder, each atomically, and remove its other files that are not hidden.

    Raises: InputError, also if there are other files and it is not the case that `replaces_others`.
    """
    with readable_errors(folder):
        found = (path for path in folder.rglob("[!.]*") if path.is_file())
        others = [path for path in found if os.path.relpath(path, folder) not in contents]
        if others and not replaces_others:
            raise InputError(f"{others[0]}: belongs to no run", advice=("move it, or give another ", Option("workdir")))
        for path in others:
            path.unlink()
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            replace(folder / name, content)


def replace_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, with an indent of two spaces. Raises: InputError."""
    replace(path, (json.dumps(content, indent=2) + "\n").encode())


def replace_csv(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV file atomically, in UTF-8 and with line feeds. Raises: InputError."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    replace(path, text.getvalue().encode(errors="surrogateescape"))


def remove(path: Path) -> None:
    """Remove a file, if it exists. Raises: InputError."""
    with readable_errors(path):
        path.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    # A rename survives a power cut after the directory is synced. Some network file systems cannot sync a directory.
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


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
        create(path.parent)
        lock = open_regular(path, "ab")
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
def one_at_a_time(path: Path, patience: float, waiting_for: str = "") -> Iterator[None]:
    """Let only one process run the block at a time; see `in_turn`.

    Args:
        patience: the longest wait for the other processes, seconds.

    Raises: Unreachable if another process holds the lock for longer.
    """
    with in_turn(path, patience, waiting_for) as is_held:
        if not is_held:
            raise Unreachable(f"{path}: locked by another process for {patience:.0f} s; end it, and start again")
        yield


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, which is renamed to `path` if the block succeeds.

    The remains of a process that was killed in the block are removed.

    Raises: InputError if the folder cannot be written, or another process writes it now.
    """
    temporary = create(path.parent) / f".{path.name}.tmp"
    with suppress(OSError):
        temporary.unlink()  # A link in a downloaded folder: the files of the folder that it names would be removed.
    with readable_errors(path), locked(temporary, path, is_folder=True):
        try:
            if remains := [*temporary.iterdir()]:
                _log.warning(f"{temporary}: the remains of an earlier command, which was ended; they are removed")
            for entry in remains:
                remove = shutil.rmtree if entry.is_dir() and not entry.is_symlink() else os.unlink
                remove(entry)
            yield temporary
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def locked(place: Path, named: Path, alternative: str = "choose another place", *, is_folder: bool) -> Iterator[None]:
    """Make a file or a folder that does not exist, and lock it during the block.

    Args:
        named: the path in the error, if the lock is for another file.

    Raises: InputError if another process has the lock; OSError.
    """
    while True:
        if is_folder:
            place.mkdir(exist_ok=True)
        handle = os.open(place, os.O_RDONLY) if is_folder else _regular_opener(str(place), os.O_WRONLY | os.O_CREAT)
        try:
            if not try_lock(handle):
                raise InputError(f"{named}: another command is writing there; wait for it, or {alternative}")
            # The other process may have removed or renamed the file before this process locked it.
            if place.exists() and os.path.samestat(os.fstat(handle), os.stat(place)):
                yield
                return
        finally:
            os.close(handle)


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet. Raises: InputError if the user has no home directory."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxddp")
    path = os.path.expanduser(os.environ.get(CACHE_VARIABLE) or default)
    if path.startswith("~"):
        raise InputError(f"{path}: there is no such home directory", advice=f"set {CACHE_VARIABLE} to a folder")
    return Path(path).absolute()


def nearest_beside(path: Path, *, alike: bool = False) -> str:
    """Return a hint with the most similar entry beside a path that does not exist.

    With `alike`, which is fast in a large folder, only the case or the code points of its name may differ.
    """
    names_beside, look = list[str](), appearance(path.name).casefold()
    with suppress(OSError):  # There may be no such folder.
        # Leave out an entry of the same name, which is a broken link.
        names_beside = [entry.name for entry in path.parent.iterdir() if entry != path]
    similar = [name for name in names_beside if not alike or appearance(name).casefold() == look]
    return nearest(path.name, similar, "" if path.is_absolute() else os.path.join(*path.parts[:-1], ""))
