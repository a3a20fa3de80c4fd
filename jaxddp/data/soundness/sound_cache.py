"""A local cache of the images that were verified to the last pixel, so that later runs need not verify them again.

An image is identified by a digest of its file's path below the root, size, and times of modification and change (see
`Store.faults`). So a changed image is verified again, and any selection of classes can use the cache. The digests of a
root are in the cache folder, in one file (a part) for each process of a job. To add digests, a process reads its part
and replaces the file atomically. If two jobs do this at the same time, digests of one job may be lost, and these images
are verified again.
"""

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.files import cache_folder
from jaxddp.data.images.header import RULES_VERSION
from jaxddp.data.storage.cache import name_of_folder, read_sealed, write_sealed
from jaxddp.data.storage.store import Fault, Store

_FOLDER = "verified"
_PARTS = 64
_MAX_ENTRIES = 4_000_000
"""The largest number of digests in a part, 8 bytes each. A larger part is cut to digests of the images of this run."""
_SECONDS = 600.0
"""The shortest time between two writes of the cache."""

_log = logging.getLogger("jaxddp.data")
# The garbage collector may close a batch iterator, which writes the cache, while another iterator writes it.
_writing = threading.RLock()


class Verified:
    """The rows of a table whose images are sound, as verified by this process or an earlier one.

    Attributes:
        sound: bool[N], True for each row that was verified.
    """

    def __init__(self, store: Store, paths: np.ndarray, offset: np.ndarray | None = None):
        self._store, self._paths, self._offset = store, paths, offset
        self.sound = np.zeros(len(paths), bool)
        # The digest of each file; 0 if the file cannot be identified.
        self._identity = np.zeros(len(paths), np.uint64)
        self._cached = self.sound.copy()
        self._next_write = time.monotonic() + _SECONDS

    def check_files(self) -> list[Fault]:
        """Mark the images that are in the cache and unchanged as sound. Return the `faults` of the store."""
        identity = np.zeros(len(self._paths), np.uint64)
        faults = self._store.faults(self._paths, identity)
        if self._offset is not None:
            identity = np.where(identity == 0, 0, _mixed(identity + self._offset.astype(np.uint64)))
        self.sound &= (identity == self._identity) | (self._identity == 0)
        self._identity = identity
        if self._store.root is not None:
            parts = [np.zeros(0, np.uint64)]
            # The cache folder may be missing.
            with suppress(OSError, InputError):
                parts += [_read(file) for file in _parts(self._store.root)]
            self._cached = np.isin(identity, np.concatenate(parts)) & (identity != 0)
            self.sound |= self._cached
        return faults

    def check_local_files(self) -> None:
        """Call `check_files` if the images are in a local store."""
        if self._store.root is not None:
            self.check_files()

    def add(self, rows: np.ndarray, part: int = 0) -> None:
        """Mark int[n] rows as sound, and write the cache if ten minutes have passed since the last write."""
        self.sound[rows] = True
        if time.monotonic() > self._next_write:
            self.write_cache(part)

    def write_cache(self, part: int = 0) -> None:
        """Write new digests to the part of one process of a job. A failure is only logged."""
        self._next_write = time.monotonic() + _SECONDS
        identified = self._identity != 0
        new, lost = self.sound & ~self._cached & identified, self._cached & ~self.sound
        if self._store.root is None or not (new | lost).any():
            return
        try:
            with _writing:
                self._write(_part(self._store.root, part), new)
                # Remove the digests of images that are damaged although their files have the same sizes and times.
                for file in _parts(self._store.root) if lost.any() else ():
                    _put(file, np.setdiff1d(_read(file), self._identity[lost]))
        # The cache folder, permission or disk space may be missing.
        except (OSError, InputError) as error:
            _log.debug("the cache of verified images of %s cannot be written (%s)", self._store.root, error)
        self._cached = self.sound & identified

    def _write(self, file: Path, new: np.ndarray) -> None:
        digests = np.union1d(_read(file), self._identity[new])
        if len(digests) > _MAX_ENTRIES:
            digests = np.unique(self._identity[self.sound])[:_MAX_ENTRIES]
        _put(file, digests)


def _part(root: Path, part: int) -> Path:
    """Return the file of a part. Raises: InputError; see `cache_folder`."""
    return cache_folder() / _FOLDER / f"{name_of_folder(root)}-{RULES_VERSION}.{part % _PARTS}"


def _parts(root: Path) -> list[Path]:
    first = _part(root, 0)
    return sorted(first.parent.glob(f"{first.stem}.*"))


def _put(file: Path, digests: np.ndarray) -> None:
    write_sealed(file, digests.astype("<u8").tobytes())


def _read(file: Path) -> np.ndarray:
    """Return the digests of a part, uint64[n]; empty if the file is damaged or cannot be read. Damage is logged."""
    try:
        content = read_sealed(file)
    except OSError:
        return np.zeros(0, np.uint64)
    if content is None:
        _log.warning("%s: damaged, and ignored; images are verified again", file)
        return np.zeros(0, np.uint64)
    return np.frombuffer(content, "<u8").astype(np.uint64)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Map uint64 numbers one-to-one to numbers that look random (SplitMix64, Steele et al. 2014)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
