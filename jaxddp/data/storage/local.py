"""`LocalFiles`: reads image files below a directory, and checks that they exist and are inside the directory."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import jaxddp.core.files as files
from jaxddp.data.storage.store import Fault, faults_by_folder

# Listing folders mostly waits for the disk or a server.
_THREADS = 16


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
