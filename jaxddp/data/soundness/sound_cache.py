"""Which images were read to their last pixel and found sound, kept for later runs on this machine.

An image is known by a digest of its file's path below the root, its size and its times of change (see `Store.faults`).
So one that changed, or that nobody has read yet, is not known, and classes may be selected anew. The digests of a root
lie in the cache folder. Each process of a job has a part of its own, which is read, added to and renamed into place;
two jobs that do so at once may lose what one of them added, and only read those images once more.
"""

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from jaxddp.core.cache_folder import cache_folder
from jaxddp.data.images.header import RULES
from jaxddp.data.storage.cache import name_of_folder, put_sealed, sealed
from jaxddp.data.storage.store import Fault, Store

_FOLDER = "verified"
_PARTS = 64
_MOST = 4_000_000
"""Of the digests in a part, 8 bytes each. A part that outgrows this starts again with the images of the current run."""
_SECONDS = 600.0
"""How long a run may read images without keeping what it found."""

_log = logging.getLogger("jaxddp.data")
# A stream that is collected as garbage keeps what it verified, which may happen while another one does.
_writing = threading.RLock()


class Verified:
    """The rows of a table whose images are known to be sound: read by this process, or unchanged since one that did.

    Attributes:
        sound: bool[N].
    """

    def __init__(self, store: Store, paths: np.ndarray, offset: np.ndarray | None = None):
        self._store, self._paths, self._offset = store, paths, offset
        self.sound = np.zeros(len(paths), bool)
        # 0 where the image could not be identified.
        self._identity = np.zeros(len(paths), np.uint64)
        self._kept = self.sound.copy()
        self._due = time.monotonic() + _SECONDS

    def look(self) -> list[Fault]:
        """Recalls the images that have not changed since they were found sound; returns the store's `faults`."""
        identity = np.zeros(len(self._paths), np.uint64)
        faults = self._store.faults(self._paths, identity)
        if self._offset is not None:
            identity = np.where(identity == 0, 0, _mixed(identity + self._offset.astype(np.uint64)))
        self.sound &= (identity == self._identity) | (self._identity == 0)
        self._identity = identity
        if self._store.root is not None:
            known = [np.zeros(0, np.uint64)]
            # There may be no place for a cache.
            with suppress(OSError, RuntimeError):
                known += [_read(file) for file in _parts(self._store.root)]
            self._kept = np.isin(identity, np.concatenate(known)) & (identity != 0)
            self.sound |= self._kept
        return faults

    def recall(self) -> None:
        """As `look`, for stores that identify images without asking another machine."""
        if self._store.root is not None:
            self.look()

    def add(self, rows: np.ndarray, part: int = 0) -> None:
        """Notes that int[n] rows are sound, and keeps what was noted every ten minutes."""
        self.sound[rows] = True
        if time.monotonic() > self._due:
            self.keep(part)

    def keep(self, part: int = 0) -> None:
        """Keeps what is new, in the part of one process of a job. Where it cannot, that is only logged."""
        self._due = time.monotonic() + _SECONDS
        identified = self._identity != 0
        new, lost = self.sound & ~self._kept & identified, self._kept & ~self.sound
        if self._store.root is None or not (new | lost).any():
            return
        try:
            with _writing:
                self._write(_part(self._store.root, part), new)
                # Images that were found to be damaged, though nothing tells from outside that they changed.
                for file in _parts(self._store.root) if lost.any() else ():
                    _put(file, np.setdiff1d(_read(file), self._identity[lost]))
        # There may be no place for a cache, no permission or no space.
        except (OSError, RuntimeError) as error:
            _log.debug("what was verified of %s cannot be kept (%s)", self._store.root, error)
        self._kept = self.sound & identified

    def _write(self, file: Path, new: np.ndarray) -> None:
        known = np.union1d(_read(file), self._identity[new])
        if len(known) > _MOST:
            known = np.unique(self._identity[self.sound])[:_MOST]
        _put(file, known)


def _part(root: Path, part: int) -> Path:
    """A part's file. Raises: RuntimeError; as `cache_folder`."""
    return cache_folder() / _FOLDER / f"{name_of_folder(root)}-{RULES}.{part % _PARTS}"


def _parts(root: Path) -> list[Path]:
    first = _part(root, 0)
    return sorted(first.parent.glob(f"{first.stem}.*"))


def _put(file: Path, digests: np.ndarray) -> None:
    put_sealed(file, digests.astype("<u8").tobytes())


def _read(file: Path) -> np.ndarray:
    """The digests of a part, uint64[n]; none where it is missing, cannot be read, or is damaged, which is logged."""
    try:
        content = sealed(file)
    except OSError:
        return np.zeros(0, np.uint64)
    if content is None:
        _log.warning("%s: damaged, and ignored; images are verified again", file)
        return np.zeros(0, np.uint64)
    return np.frombuffer(content, "<u8").astype(np.uint64)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """uint64 numbers, each to another that looks random (SplitMix64, Steele and others 2014)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
