"""Large files that hold many images: the files of a folder on this machine, or the objects below a URL.

The formats of such files (Parquet, tar) find, open and identify their files through the protocol `ShardFolder`, so they
read local files and objects with the same code.
"""

import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Key
from jaxddp.data.storage.objects import Objects
from jaxddp.data.storage.records import missing_files
from jaxddp.data.storage.root import is_url
from jaxddp.data.storage.store import CachedStore, Fault, Store

_READ_AHEAD = 1 << 16
"""The least number of bytes that are requested from an object at a time. The headers of small images come together."""


SHARDS = (".tar", ".parquet")


class ShardFolder(Protocol):
    """A folder with files that hold many images. Paths are relative to it, with forward slashes."""

    @property
    def root(self) -> Path | None:
        """The folder on this machine; None for objects of a remote store."""
        ...

    @property
    def can_list(self) -> bool:
        """Whether `files` works. A plain web server cannot list its files."""
        ...

    def name(self, path: str = "") -> str:
        """Return a readable name of a file, or of the folder, for messages."""
        ...

    def files(self, folder: str = "") -> list[str]:
        """Return the paths of the files directly in a folder, sorted; none if there is no such folder."""
        ...

    def state(self, path: str) -> tuple[int, str]:
        """Return the size of a file in bytes, and a text that changes with the file. Raises: FileNotFoundError."""
        ...

    def open(self, path: str) -> BinaryIO:
        """Open a file, for reading at any position. Raises: OSError, or an error of the store."""
        ...

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return a part of a file; shorter if the file ends before. Raises: OSError, or an error of the store."""
        ...

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        """Return the faults of `Store.faults`; the files in `paths` repeat."""
        ...


@dataclass(frozen=True)
class LocalShards:
    """The files of a folder on this machine."""

    root: Path
    can_list = True

    def name(self, path: str = "") -> str:
        return str(self.root / path)

    def files(self, folder: str = "") -> list[str]:
        try:
            names = [entry.name for entry in os.scandir(self.root / folder) if not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(os.path.join(folder, name) for name in names)

    def state(self, path: str) -> tuple[int, str]:
        status = (self.root / path).stat()
        return status.st_size, str(status.st_mtime_ns)

    def open(self, path: str) -> BinaryIO:
        # Do not buffer: most reads are of a header, and the data of an image follow it.
        return files.open_regular(self.root / path, buffering=0)

    def read(self, path: str, start: int, length: int) -> bytes:
        with files.open_regular(self.root / path, buffering=0) as file:
            return os.pread(file.fileno(), length, start)

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        return missing_files(self.root, paths, identity)


@dataclass(frozen=True)
class RemoteShards:
    """The objects below a URL. A folder is listed once, and the result is kept."""

    objects: Objects
    _listed: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict, compare=False, repr=False)

    root = None

    @property
    def can_list(self) -> bool:
        return self.objects.can_list

    def name(self, path: str = "") -> str:
        return self.objects.name(os.fsencode(path)) if path else self.objects.url

    def files(self, folder: str = "") -> list[str]:
        return sorted(self._states(folder)) if self.can_list else []

    def state(self, path: str) -> tuple[int, str]:
        listed = self._states(path.rpartition("/")[0]) if self.can_list else {}
        return listed[path] if path in listed else self.objects.state(os.fsencode(path))

    def open(self, path: str) -> BinaryIO:
        return io.BufferedReader(_RemoteFile(self, path, self.state(path)[0]), _READ_AHEAD)

    def read(self, path: str, start: int, length: int) -> bytes:
        return self.objects.read_range(os.fsencode(path), start, length)

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        names, inverse = np.unique(paths, return_inverse=True)
        wrong = {names[row]: fault.replace("the image", "its file") for row, fault in self.objects.faults(names)}
        return [(row, wrong[names[place]]) for row, place in enumerate(inverse) if names[place] in wrong]

    def _states(self, folder: str) -> dict[str, tuple[int, str]]:
        if folder not in self._listed:
            states = self.objects.states(os.fsencode(folder))
            self._listed[folder] = {os.fsdecode(path): state for path, state in states.items()}
        return self._listed[folder]


class _RemoteFile(io.RawIOBase):
    """An object, as a file that can be read at any position."""

    def __init__(self, shards: RemoteShards, path: str, size: int):
        self._shards, self._path, self._size, self._position = shards, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._position)
        if length <= 0:
            return 0
        data = self._shards.read(self._path, self._position, length)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@dataclass(frozen=True)
class ShardFile:
    """One file of a folder; `str` returns its readable name."""

    folder: ShardFolder
    path: str
    """The path in the folder."""

    def __str__(self) -> str:
        return self.folder.name(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def size(self) -> int:
        """The size in bytes. Raises: see `ShardFolder.state`."""
        return self.folder.state(self.path)[0]


def split_address(address: str) -> tuple[str, str]:
    """Return (folder, pattern) of an address: the parts before and after the last slash that no pattern precedes.

    The pattern is empty if the address has neither `{`, `*` nor `?`, and does not end like a shard (.tar, .parquet).
    """
    special = min((at for sign in "{*?" if (at := address.find(sign)) >= 0), default=len(address))
    if special == len(address) and not address.lower().endswith(SHARDS):
        return address, ""
    folder, slash, _ = address[:special].rpartition("/")
    return folder or slash or ".", address[len(folder) + len(slash) :]


def shard_folder(address: str) -> ShardFolder:
    """Return the folder of a path or URL, without a request. Raises: InputError; see `Objects.open`."""
    if is_url(address):
        return RemoteShards(Objects.open(address))
    return LocalShards(files.expanded(address).absolute())


def with_cache(store: Store, folder: ShardFolder, cache: str | None) -> Store:
    """Return a store that keeps the images of a URL in the folder `cache`; the same store if `cache` is None.

    Raises:
        InputError: the files are on this machine.
    """
    if cache is None:
        return store
    if folder.root is not None:
        advice = ("leave ", Key("data.local_cache"), " out")
        raise InputError(
            Key("data.local_cache", cache), f": {folder.name()} is on this machine and read in place", advice=advice
        )
    return CachedStore(store, cache)
