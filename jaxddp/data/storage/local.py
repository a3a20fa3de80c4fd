"""Images on disk below a data set's root: whether each is there, and whether symbolic links lead out of the root."""

import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from jaxddp.data.storage.store import Fault
from jaxddp.errors import InputError

# Listing folders mostly waits for the disk or for a server.
_THREADS = 16


@dataclass(frozen=True)
class LocalFiles:
    """Images that are files of their own, below a directory."""

    root: Path

    def name(self, path: bytes, offset: int = 0) -> str:
        return f"{self.root}/{os.fsdecode(path)}"

    def read(self, path: bytes, offset: int = 0) -> bytes:
        name = self.name(path)
        try:
            return Path(name).read_bytes()
        except FileNotFoundError:
            raise InputError(f"{name}: missing image; download it or remove its row") from None
        except OSError as error:
            raise InputError(f"{name}: cannot be read ({error.strerror}); make it a readable image file") from None

    def in_graph(self) -> Callable[[Any, Any], Any]:
        from jaxddp.data.tensorflow_cpu import tf

        top = os.fsencode(self.root) + b"/"
        return lambda path, offset: tf.io.read_file(top + path)

    def faults(self, paths: np.ndarray) -> list[Fault]:
        """No path may be there twice. An image is also at fault where it is no regular file, or outside the root."""
        top, home = os.fsencode(self.root), os.path.realpath(os.fsencode(self.root))
        folders: dict[bytes, dict[bytes, int]] = defaultdict(dict)
        for row, path in enumerate(paths.tolist()):
            folder, _, name = path.rpartition(b"/")
            folders[folder][name] = row

        def unusable(item: tuple[bytes, dict[bytes, int]]) -> list[Fault]:
            return list(_unusable(os.path.join(top, item[0]), item[1], home))

        with ThreadPoolExecutor(_THREADS) as pool:
            return sorted(chain.from_iterable(pool.map(unusable, folders.items())))


def links_out(root: Path, paths: np.ndarray) -> list[Fault]:
    """The rows of bytes 'S'[N] whose image a symbolic link, of its own or of a folder above it, leads out of the root.

    The root itself may be a link, and links within it may lead anywhere within it. Missing files are ignored.
    This costs one listing for each folder, which tells links from files without another system call.
    """
    top, home = os.fsencode(root), os.path.realpath(os.fsencode(root))

    def leaving(folder: bytes) -> list[tuple[bytes, bytes]]:
        return list(_leaving(top, folder, home))

    folders = {path.rpartition(b"/")[0] for path in paths.tolist()}
    with ThreadPoolExecutor(_THREADS) as pool:
        targets = dict(chain.from_iterable(pool.map(leaving, folders)))
    return [
        (row, _leads_out(targets[name]))
        for row, path in enumerate(paths.tolist())
        for name in (path.rpartition(b"/")[0], path)
        if name in targets
    ]


def _leaving(top: bytes, folder: bytes, home: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields (path below top, target) of the folder, or else of each entry in it, that leads out of home."""
    place = os.path.join(top, folder)
    if target := _outside(place, home):
        yield folder, target
        return
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.is_symlink() and (target := _outside(entry.path, home)):
                yield os.path.join(folder, entry.name), target


def _unusable(folder: bytes, rows: dict[bytes, int], home: bytes) -> Iterator[Fault]:
    if target := _outside(folder, home):
        yield from ((row, _leads_out(target)) for row in rows.values())
        return
    absent, missing = "the image is missing", dict(rows)
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                row = missing.pop(entry.name, None)
                if row is not None and (fault := _fault(entry, home)):
                    yield row, fault
    except FileNotFoundError:
        absent = "the image's folder is missing"
    except OSError as error:
        absent = f"the image's folder cannot be read ({error.strerror})"
    yield from ((row, absent) for row in missing.values())


def _fault(entry: os.DirEntry[bytes], home: bytes) -> str | None:
    if entry.is_symlink() and (target := _outside(entry.path, home)):
        return _leads_out(target)
    try:
        status = entry.stat()
    except OSError as error:
        return f"the image cannot be read ({error.strerror})"
    if not stat.S_ISREG(status.st_mode):
        return "the image is not a regular file"
    return None if status.st_size else "the image is empty"


def _outside(path: bytes, home: bytes) -> bytes | None:
    """Returns what a path really is, links followed, where that is not below home."""
    target = os.path.realpath(path)
    return None if target == home or target.startswith(os.path.join(home, b"")) else target


def _leads_out(target: bytes) -> str:
    return f"a symbolic link leads out of the data set, to {os.fsdecode(target)!r}"
