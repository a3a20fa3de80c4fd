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
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Protocol

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
        return sorted(chain.from_iterable(pool.map(lambda item: list(find_faults(*item)), folders.items())))


@dataclass(frozen=True)
class LocalFiles:
    """The files below a directory: a store of images, and a folder of files that hold many images (`Folder`)."""

    root: Path
    can_list = True

    def name(self, path: bytes | str = "", offset: int = 0) -> str:
        return str(self.root / os.fsdecode(path))

    def read(self, path: bytes, offset: int = 0) -> bytes:
        name, missing = self.name(path), "missing image; download it or leave it out"
        with files.reading(name, "make it a readable image file", missing=missing):
            return files.read(name)

    def read_text(self, path: str) -> bytes:
        return files.read(self.root / path)

    def read_range(self, path: str, start: int, length: int) -> bytes:
        with self.open(path) as file:
            return os.pread(file.fileno(), length, start)

    def open(self, path: str) -> BinaryIO:
        # Do not buffer: most reads are of a header, and the data of an image follow it.
        return files.open_regular(self.root / path, buffering=0)

    def files(self, folder: str = "") -> list[str]:
        try:
            names = [name for name in os.listdir(self.root / folder) if not name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(os.path.join(folder, name) for name in names)

    def state(self, path: str) -> tuple[int, str]:
        status = (self.root / path).stat()
        return status.st_size, str(status.st_mtime_ns)

    def in_graph(self) -> Callable[[Any, Any], Any]:
        return _read_op

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        """Return the faults of `Store.faults`, and also images that are not regular files or are outside the root.

        All paths must be different.
        """

        def fault_of(row: int, entry: os.DirEntry[bytes]) -> str | None:
            try:
                status = entry.stat()
            except OSError as error:
                return f"the image cannot be read ({error.strerror})"
            if not stat.S_ISREG(status.st_mode):
                return "the image is not a regular file"
            if identity is not None:
                identity[row] = _identity(bytes(paths[row]), status)
            return None if status.st_size else "the image is empty"

        return _faults(self.root, paths, fault_of, missing_too=True)


def faults_of_shards(store: Any, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
    """Return the faults of `Store.faults` for files that hold many images: the files in `paths` repeat.

    Args:
        store: the store of the files themselves, which checks each of them as if it were an image.
    """
    shards, inverse = np.unique(paths, return_inverse=True)
    of_shard = None if identity is None else np.zeros(len(shards), np.uint64)
    wrong = {row: fault.replace("the image", "its file") for row, fault in store.faults(shards, of_shard)}
    if identity is not None and of_shard is not None:
        identity[:] = of_shard[inverse]
    return [(row, wrong[shard]) for row, shard in enumerate(inverse.tolist()) if shard in wrong]


def links_out(root: Path, paths: np.ndarray) -> list[Fault]:
    """Return the rows of bytes 'S'[N] whose image, or a folder above it, is a symbolic link out of the root.

    The root itself may be a link, and links may lead anywhere within the root. Missing files are ignored. Each folder
    is listed once, because the listing shows which entries are links without a system call for each entry.
    """
    return _faults(root, paths, lambda row, entry: None, missing_too=False)


def check_regular(folder: Path, advice: str) -> None:
    """Check that all files below a folder are regular files: a library would block on a FIFO. Raises: InputError."""
    for file in sorted(path for path in folder.rglob("*") if path.exists() and not path.is_dir()):
        with files.reading(file, advice):
            files.open_regular(file).close()


def _read_op(path: Any, offset: Any) -> Any:
    from jaxddp.data.stream.tensorflow_cpu import tf

    return tf.io.read_file(path)


def _faults(
    root: Path, paths: np.ndarray, fault_of: Callable[[int, os.DirEntry[bytes]], str | None], *, missing_too: bool
) -> list[Fault]:
    """Return the links out of the root, the faults that `fault_of` finds in other files, and perhaps missing files."""
    root_bytes, real_root = os.fsencode(root), os.path.realpath(os.fsencode(root))

    def in_folder(folder: bytes, rows: dict[bytes, int]) -> Iterator[Fault]:
        place, absent, missing = os.path.join(root_bytes, folder), "the image is missing", dict(rows)
        if fault := link_out(place, real_root):
            yield from ((row, fault) for row in rows.values())
            return
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    row = missing.pop(entry.name, None)
                    if row is None:
                        continue
                    fault = entry.is_symlink() and link_out(entry.path, real_root)
                    if fault := fault or fault_of(row, entry):
                        yield row, fault
        except FileNotFoundError:
            absent = "the image's folder is missing"
        except OSError as error:
            absent = f"the image's folder cannot be read ({error.strerror})"
        if missing_too:
            yield from ((row, absent) for row in missing.values())

    return faults_by_folder(paths, in_folder, _THREADS)


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


def name_of_folder(folder: Path | str) -> str:
    """Return 16 hex digits that identify a folder, the same for every path of the folder, or a URL."""
    place = os.path.realpath(folder) if isinstance(folder, Path) else folder
    return hashlib.sha256(os.fsencode(place)).hexdigest()[:16]


def _digest(name: bytes, data: bytes) -> bytes:
    return hashlib.sha256(b"%d\n%b%b" % (len(name), name, data)).digest()
