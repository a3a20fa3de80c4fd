"""`CachedStore` keeps fetched images of a remote store in a local folder. `write_sealed` adds a checksum to a file."""

import hashlib
import logging
import os
import threading
import uuid
from contextlib import suppress
from os import PathLike
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.data.storage.store import Fault, Store

_log = logging.getLogger("jaxddp.data")
_warning_lock = threading.Lock()
_DIGEST = 32


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
