"""The protocol `Store` of places with encoded images; files of this machine, and a local cache of remote images."""

import hashlib
import logging
import os
import stat
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import jaxddp.core.files as files

Fault = tuple[int, str]
"""A row, and a clause that describes the fault of its image."""
# Listing folders mostly waits for the disk or a server.
_THREADS = 16
_log = logging.getLogger("jaxddp.data")
_warning_lock = threading.Lock()
_DIGEST = 32


class Store(Protocol):
    """A store of encoded images. A path identifies a file; an offset identifies an image in a file of many images."""

    @property
    def root(self) -> Path | None:
        """The directory of the store's files; None if a file cannot be identified without reading it."""
        ...

    def name(self, path: bytes, offset: int = 0) -> str:
        """Return a readable name of the image, for messages."""
        ...

    def read(self, path: bytes, offset: int = 0) -> bytes:
        """Return the encoded image. Several threads may call this at the same time.

        Raises:
            InputError: the image is missing, or cannot be read; the message names it.
            Unreachable: a remote store did not answer within its deadline.
        """
        ...

    def in_graph(self) -> Callable[[Any, Any], Any] | None:
        """Return a function of TensorFlow ops that reads an image faster than `read`; None if threads must call `read`.

        The function takes a file below the `root`, a string scalar, and an offset, an int64 scalar, and returns the
        encoded image, a string scalar. Stores that read in the same way return the same function, so a graph
        with the function is traced only once.
        """
        ...

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        """Return the rows of `paths`, bytes 'S'[N], whose image is missing or empty, ascending. No image is opened.

        A store with a `root` writes to `identity`, uint64[N], a number other than 0 that depends on a file's path below
        the root, its size, and its times of change.
        """
        ...


def faults_by_folder(
    paths: np.ndarray, find_faults: Callable[[bytes, dict[bytes, int]], Iterable[Fault]], threads: int
) -> list[Fault]:
    """Return the faults that `find_faults` finds in each folder of `paths`, bytes 'S'[N], all different.

    Args:
        find_faults: a function of a folder and a dict from its file names to rows; it returns faults.
    """
    folders: dict[bytes, dict[bytes, int]] = defaultdict(dict)
    for row, path in enumerate(paths.tolist()):
        folder, _, name = path.rpartition(b"/")
        folders[folder][name] = row
    with ThreadPoolExecutor(threads) as pool:
        return sorted(
            fault for faults in pool.map(lambda item: list(find_faults(*item)), folders.items()) for fault in faults
        )


@dataclass(frozen=True)
class LocalFiles:
    """A store of image files below a directory."""

    root: Path

    def name(self, path: bytes, offset: int = 0) -> str:
        return os.path.join(self.root, os.fsdecode(path))

    def read(self, path: bytes, offset: int = 0) -> bytes:
        name = self.name(path)
        missing = "missing image; download it or leave it out"
        with files.reading(name, "make it a readable image file", missing=missing):
            return files.read(name)

    def in_graph(self) -> Callable[[Any, Any], Any]:
        return _read_op

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        """Return the faults of `Store.faults`, and also images that are not regular files or are outside the root.

        All paths must be different.
        """
        return _faults(self.root, paths, partial(_faults_of_folder, paths=paths, identity=identity))


def links_out(root: Path, paths: np.ndarray) -> list[Fault]:
    """Return the rows of bytes 'S'[N] whose image, or a folder above it, is a symbolic link out of the root.

    The root itself may be a link, and links may lead anywhere within the root. Missing files are ignored. Each folder
    is listed once, because the listing shows which entries are links without a system call for each entry.
    """
    return _faults(root, paths, _links_out_of_folder)


def check_regular(folder: Path, advice: str) -> None:
    """Check that all files below a folder are regular files: a library would block on a FIFO. Raises: InputError."""
    for file in sorted(path for path in folder.rglob("*") if path.exists() and not path.is_dir()):
        with files.reading(file, advice):
            files.open_regular(file).close()


def _read_op(path: Any, offset: Any) -> Any:
    from jaxddp.data.stream.tensorflow_cpu import tf

    return tf.io.read_file(path)


def _faults(root: Path, paths: np.ndarray, find_faults: Callable[..., Iterator[Fault]]) -> list[Fault]:
    """Return the faults of all folders. The arguments of `find_faults` are a folder, its rows, and the real root."""
    root_bytes, real_root = os.fsencode(root), os.path.realpath(os.fsencode(root))

    def in_folder(folder: bytes, rows: dict[bytes, int]) -> list[Fault]:
        place = os.path.join(root_bytes, folder)
        if fault := link_out(place, real_root):
            return [(row, fault) for row in rows.values()]
        return list(find_faults(place, rows, real_root))

    return faults_by_folder(paths, in_folder, _THREADS)


def _links_out_of_folder(folder: bytes, rows: dict[bytes, int], real_root: bytes) -> Iterator[Fault]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in rows and entry.is_symlink() and (fault := link_out(entry.path, real_root)):
                yield rows[entry.name], fault


def _faults_of_folder(
    folder: bytes, rows: dict[bytes, int], real_root: bytes, paths: np.ndarray, identity: np.ndarray | None
) -> Iterator[Fault]:
    absent, missing = "the image is missing", dict(rows)
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                row = missing.pop(entry.name, None)
                if row is None:
                    continue
                if fault := _fault(entry, real_root):
                    yield row, fault
                elif identity is not None:
                    # `_fault` has read the status of the file, and the entry keeps it.
                    identity[row] = _identity(bytes(paths[row]), entry.stat())
    except FileNotFoundError:
        absent = "the image's folder is missing"
    except OSError as error:
        absent = f"the image's folder cannot be read ({error.strerror})"
    yield from ((row, absent) for row in missing.values())


def _fault(entry: os.DirEntry[bytes], real_root: bytes) -> str | None:
    if entry.is_symlink() and (fault := link_out(entry.path, real_root)):
        return fault
    try:
        status = entry.stat()
    except OSError as error:
        return f"the image cannot be read ({error.strerror})"
    if not stat.S_ISREG(status.st_mode):
        return "the image is not a regular file"
    return None if status.st_size else "the image is empty"


def _identity(path: bytes, status: os.stat_result) -> int:
    # Programs can set the time of the last modification back, but not the time of the last status change.
    text = b"%d %d %d %b" % (status.st_size, status.st_mtime_ns, status.st_ctime_ns, path)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) or 1


def link_out(path: bytes, real_root: bytes) -> str | None:
    """Return a fault if a path, with links resolved, is outside `real_root`; None if it is inside."""
    target = os.path.realpath(path)
    if target == real_root or target.startswith(os.path.join(real_root, b"")):
        return None
    return f"a symbolic link leads out of the data set, to {os.fsdecode(target)!r}"


class CachedStore:
    """A store that keeps each fetched image in a folder for the next time.

    A file holds the image, followed by the SHA-256 of the image's name and bytes, so a damaged file is detected and the
    image fetched again. Several processes may share the folder, which is made if it does not exist.

    Files are never removed, and never compared with the store again. So the folder needs room for the data set, and
    the user must empty it when images change but keep their names. If the folder cannot be written, for example because
    the disk is full, a warning is logged once, and reading continues.

    Raises: InputError if the folder cannot be made.
    """

    root = None

    def __init__(self, store: Store, folder: str | PathLike[str]):
        self.store = store
        self.folder = files.create(files.expanded(folder).absolute())
        self._can_write = True

    def name(self, path: bytes, offset: int = 0) -> str:
        return self.store.name(path, offset)

    def read(self, path: bytes, offset: int = 0) -> bytes:
        name = os.fsencode(self.name(path, offset))
        key = hashlib.sha256(name).hexdigest()
        file = self.folder / key[:2] / key
        with suppress(OSError):
            content = files.read(file)
            if content[-_DIGEST:] == _digest(name, content[:-_DIGEST]):
                return content[:-_DIGEST]
        data = self.store.read(path, offset)
        if self._can_write:
            self._save(file, data + _digest(name, data))
        return data

    # TensorFlow's ops would not write the images to the cache folder.
    def in_graph(self) -> None: ...

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        return self.store.faults(paths)

    def _save(self, file: Path, content: bytes) -> None:
        try:
            write_atomically(file, content)
        except OSError as error:
            with _warning_lock:
                is_first, self._can_write = self._can_write, False
            if is_first:
                advice = "no more images are kept there, so free some space or name another folder"
                _log.warning(f"{self.folder}: cannot be written ({error.strerror}); {advice}")


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file atomically; other processes may read or write it at the same time. Raises: OSError."""
    unfinished = file.with_name(f".{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        os.replace(unfinished, file)
    finally:
        # After the rename, the unfinished file no longer exists.
        with suppress(OSError):
            unfinished.unlink()


def write_sealed(file: Path, content: bytes) -> None:
    """Write a file atomically, with the SHA-256 of its content at the beginning, for `read_sealed`."""
    write_atomically(file, hashlib.sha256(content).digest() + content)


def read_sealed(file: Path) -> bytes | None:
    """Return the content that `write_sealed` wrote; None if the file is damaged. Raises: OSError."""
    data = files.read(file)
    content = data[_DIGEST:]
    return content if data[:_DIGEST] == hashlib.sha256(content).digest() else None


def name_of_folder(folder: Path) -> str:
    """Return 16 hex digits that identify a folder, the same for every path of the folder."""
    return hashlib.sha256(os.path.realpath(os.fsencode(folder))).hexdigest()[:16]


def _digest(name: bytes, data: bytes) -> bytes:
    return hashlib.sha256(b"%d\n%b%b" % (len(name), name, data)).digest()
