"""The protocol `Store` of places with encoded images; files of this machine, and a local cache of remote images."""

import hashlib
import logging
import os
import pickle
import stat
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Key

Fault = tuple[int, str]
"""A row, and a clause that describes the fault of its image."""
Look = Callable[[bytes, dict[bytes, int]], dict[int, str | None]]
"""A function of a folder and a dict from its file names to rows: the rows whose files exist, with their faults."""
# Listing waits for the disk or a server, and a training set of a server has a thousand folders of two pages each.
_THREADS = 32
_log = logging.getLogger("jaxddp.data")
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

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        """Return the rows of `paths`, bytes 'S'[N], whose image is missing or empty, ascending. No image is opened.

        A store with a `root` writes to `identity`, uint64[N], a number other than 0 that depends on a file's path below
        the root, its size, and its times of change.
        """
        ...


def faults_by_folder(paths: np.ndarray, look: Look, *, missing_too: bool = True) -> list[Fault]:
    """Return the faults of the images `paths`, bytes 'S'[N], all different. Each folder is looked at once.

    Args:
        look: raises an OSError if the folder cannot be read.
        missing_too: whether a missing image is a fault.
    """
    folders: dict[bytes, dict[bytes, int]] = defaultdict(dict)
    for row, path in enumerate(paths.tolist()):
        folder, _, name = path.rpartition(b"/")
        folders[folder][name] = row

    def faults_of(folder: bytes) -> list[Fault]:
        absent, found = "the image is missing", dict[int, str | None]()
        try:
            found = look(folder, folders[folder])
        except FileNotFoundError:
            absent = "the image's folder is missing"
        except OSError as error:
            absent = f"the image's folder cannot be read ({error.strerror})"
        faults = ((row, found.get(row, absent if missing_too else None)) for row in folders[folder].values())
        return [(row, fault) for row, fault in faults if fault]

    with ThreadPoolExecutor(_THREADS) as pool:
        return sorted(chain.from_iterable(pool.map(faults_of, folders)))


@dataclass(frozen=True)
class LocalFiles:
    """The files below a directory: a store of images, and a folder of files that hold many images (`Folder`)."""

    root: Path
    follows_links: bool = False
    """Whether symbolic links may lead out of the root. They may not where a table or an archive names the files."""
    can_list = True

    def name(self, path: bytes | str = "", offset: int = 0) -> str:
        return os.path.join(self.root, os.fsdecode(path)) if path else str(self.root)

    def read(self, path: bytes, offset: int = 0) -> bytes:
        missing = "missing image; download it or leave it out"
        return files.content_of(self.name(path), "make it a readable image file", missing=missing)

    def read_text(self, path: str) -> bytes:
        return files.read(self.root / path)

    def read_range(self, path: str, start: int, length: int) -> bytes:
        with self.open(path) as file:
            return os.pread(file.fileno(), length, start)

    def open(self, path: str) -> BinaryIO:
        # Do not buffer: most reads are of a header, and the data of an image follow it.
        return files.open_regular(self.root / path, buffering=0)

    def files(self, folder: str = "") -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            names = sorted(os.listdir(self.root / folder))
            return [os.path.join(folder, name) for name in names if not is_passed_over(name)]
        return []

    def state(self, path: str) -> tuple[int, str]:
        status = (self.root / path).stat()
        return status.st_size, str(status.st_mtime_ns)

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None, *, links_only: bool = False) -> list[Fault]:
        """Return the faults of `Store.faults`, and also images that are not regular files or are outside the root.

        The root may be a link, and links may lead anywhere within it; see `follows_links`. All paths must be different.

        Args:
            links_only: whether to return only the links out of the root. The listing of a folder shows which entries
                are links, without a system call for each entry.
        """
        real_root = b"/" if self.follows_links else os.path.realpath(os.fsencode(self.root))

        def fault_of(row: int, entry: os.DirEntry[bytes]) -> str | None:
            if entry.is_symlink() and (fault := link_out(entry.path, real_root)):
                return fault
            if links_only:
                return None
            try:
                status = entry.stat()
            except OSError as error:
                return f"the image cannot be read ({error.strerror})"
            if not stat.S_ISREG(status.st_mode):
                return "the image is not a regular file"
            if identity is not None:
                identity[row] = identity_of(bytes(paths[row]), status)
            return None if status.st_size else "the image is empty"

        def look(folder: bytes, rows: dict[bytes, int]) -> dict[int, str | None]:
            place = os.path.join(os.fsencode(self.root), folder)
            if fault := link_out(place, real_root):
                return dict.fromkeys(rows.values(), fault)
            with os.scandir(place) as entries:
                return {rows[entry.name]: fault_of(rows[entry.name], entry) for entry in entries if entry.name in rows}

        return faults_by_folder(paths, look, missing_too=not links_only)


class ShardStore:
    """What all stores of large files that hold many images have in common."""

    folder: Any
    """The `Folder` of the files. It checks each file as if the file were an image."""
    record = "row"
    """What an offset counts, for messages."""

    def name(self, path: bytes, offset: int = 0) -> str:
        return f"{self.folder.name(path)}, {self.record} {offset}"

    @property
    def root(self) -> Path | None:
        return self.folder.root

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        shards, inverse = np.unique(paths, return_inverse=True)
        of_shard = np.zeros(len(shards), np.uint64)
        wrong = {row: fault.replace("the image", "its file") for row, fault in self.folder.faults(shards, of_shard)}
        if identity is not None:
            identity[:] = of_shard[inverse]
        return [(row, wrong[shard]) for row, shard in enumerate(inverse.tolist()) if shard in wrong]


def pickled(store: Store, workers: int) -> bytes:
    """Return a store for the processes of `data.workers`. Raises: InputError for a store with a cache of its own."""
    try:
        return pickle.dumps(store)
    except (TypeError, AttributeError, pickle.PicklingError):
        fault = ": needs images in files, TFRecord or .tar files of this machine"
        advice = "set it to 0, or write the images to TFRecord files with `jaxddp data pack`"
        raise InputError(Key("data.workers", workers), fault, advice=advice) from None


def is_passed_over(name: str) -> bool:
    """Return whether a name is hidden, or that of a folder which macOS or a network drive adds to a data set."""
    return name.startswith(".") or name in ("__MACOSX", "@eaDir")


def check_regular(folder: Path, advice: str) -> None:
    """Check that all files below a folder are regular files: a library would block on a FIFO. Raises: InputError."""
    for file in sorted(path for path in folder.rglob("*") if path.exists() and not path.is_dir()):
        with files.reading(file, advice):
            files.open_regular(file).close()


def identity_of(path: bytes, status: os.stat_result) -> int:
    """Return a number other than 0 that depends on a path, a size and the times of change."""
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

    A file holds the SHA-256 of the image's name and bytes, the name, and the image, so a damaged file is detected and
    the image fetched again. Several processes may share the folder, which is made if it does not exist.

    Files are never removed, so the folder needs room for the data set. An image of a shard is fetched again if the
    shard has changed, because the row may now be another image. Others are never compared with the store again, and the
    user must empty the folder when they change but keep their names. If the folder cannot be written, for example
    because the disk is full, a warning is logged once, and reading continues.

    Raises: InputError if the folder cannot be made.
    """

    root = None

    def __init__(self, store: Store, folder: str | PathLike[str]):
        self.store = store
        self.folder = files.create(files.expanded(folder).absolute())
        # The lock is never released after the folder could not be written, so the warning is logged once.
        self._full = threading.Lock()

    def name(self, path: bytes, offset: int = 0) -> str:
        return self.store.name(path, offset)

    def read(self, path: bytes, offset: int = 0) -> bytes:
        state = self.store.folder.state(os.fsdecode(path))[1] if isinstance(self.store, ShardStore) else ""
        name = os.fsencode(f"{self.name(path, offset)} {state}".rstrip()) + b"\n"
        key = hashlib.sha256(name).hexdigest()
        file = self.folder / key[:2] / key
        with suppress(OSError):
            if (content := read_sealed(file) or b"").startswith(name):
                return content.removeprefix(name)
        data = self.store.read(path, offset)
        try:
            if not self._full.locked():
                write_sealed(file, name + data)
        except OSError as error:
            if self._full.acquire(blocking=False):
                advice = "no more images are kept there, so free some space or name another folder"
                _log.warning(f"{self.folder}: cannot be written ({error.strerror}); {advice}")
        return data

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        return self.store.faults(paths)


def write_sealed(file: Path, content: bytes) -> None:
    """Write a file with the SHA-256 of its content at the beginning, for `read_sealed`.

    The file is replaced atomically. Other processes may read or write it at the same time. Raises: OSError.
    """
    unfinished = file.with_name(f".{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(hashlib.sha256(content).digest() + content)
        os.replace(unfinished, file)
    finally:
        # After the rename, the unfinished file no longer exists.
        unfinished.unlink(missing_ok=True)


def read_sealed(file: Path) -> bytes | None:
    """Return the content that `write_sealed` wrote; None if the file is damaged. Raises: OSError."""
    data = files.read(file)
    content = data[_DIGEST:]
    return content if data[:_DIGEST] == hashlib.sha256(content).digest() else None


def name_of_folder(folder: Path | str) -> str:
    """Return 16 hex digits that identify a folder, the same for every path of the folder, or a URL."""
    place = os.path.realpath(folder) if isinstance(folder, Path) else folder
    return hashlib.sha256(os.fsencode(place)).hexdigest()[:16]
