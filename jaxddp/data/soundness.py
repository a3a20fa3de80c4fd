"""The soundness of a table's images: checksums, and a cache of verified images.

The cache identifies an image by a digest of its file's path below the root, size, and times of modification and change
(see `Store.faults`). So a changed image is verified again, and any selection of classes can use the cache. The digests
of a root are in the cache folder, in one file (a part) for each process of a job. To add digests, a process reads its
part and replaces the file atomically. If two jobs do this at the same time, digests of one job may be lost, and these
images are verified again.
"""

import hashlib
import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.files import cache_folder
from jaxddp.data.storage.store import Fault, Store, name_of_folder, read_sealed, write_sealed

_log = logging.getLogger("jaxddp.data")
_FOLDER = "verified"
_PARTS = 64
_MAX_ENTRIES = 4_000_000
"""The largest number of digests in a part, 8 bytes each. A larger part is cut to digests of the images of this run."""
_SECONDS = 600.0
"""The shortest time between two writes of the cache."""
# The garbage collector may close a batch iterator, which writes the cache, while another iterator writes it.
_writing = threading.RLock()
RULES_VERSION = 3
"""The version of the rules of `verify`. Increase it if they become stricter, so that every image is verified again."""


@dataclass(frozen=True, eq=False)
class Digests:
    """The checksums in a manifest of the files of N rows.

    Attributes:
        manifest: the path of the manifest, for messages.
        sha256: void 'V32'[N]; zeros for a row that is not in the manifest. The dtype 'S32' would drop trailing zeros.
    """

    manifest: str
    sha256: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> "Digests":
        """Return the digests of int[n] rows, in that order."""
        return Digests(self.manifest, self.sha256[rows])

    def fault(self, row: int, data: bytes) -> str | None:
        """Return a message about the difference between a row's file and the manifest; None if they agree."""
        expected, actual = self.sha256[row].tobytes().hex(), hashlib.sha256(data).hexdigest()
        if actual == expected:
            return None
        if not int(expected, 16):
            return f"{self.manifest} does not list it; run `jaxddp data check` again"
        both = f"its SHA-256 is {actual[:12]}…, and {expected[:12]}… in {self.manifest}"
        return f"{both}; put the file back, or run `jaxddp data check` again if the change is intended"


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
            identity = np.where(identity == 0, 0, identity + self._offset.astype(np.uint64))
        self.sound &= (identity == self._identity) | (self._identity == 0)
        self._identity = identity
        if self._store.root is not None:
            parts = [np.zeros(1, np.uint64)]
            # The cache folder may be missing.
            with suppress(OSError, InputError):
                parts += map(_read, _parts(self._store.root))
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
                own = _part(self._store.root, part)
                for file in {own, *(_parts(self._store.root) if lost.any() else ())}:
                    # Remove the digests of images that are damaged although their files have the same size and times.
                    digests = np.setdiff1d(_read(file), self._identity[lost])
                    if file == own:
                        digests = np.union1d(digests, self._identity[new])
                    if len(digests) > _MAX_ENTRIES:
                        digests = np.unique(self._identity[self.sound])[:_MAX_ENTRIES]
                    write_sealed(file, digests.astype("<u8").tobytes())
        # The cache folder, permission or disk space may be missing.
        except (OSError, InputError) as error:
            _log.debug("the cache of verified images of %s cannot be written (%s)", self._store.root, error)
        self._cached = self.sound & identified


def _part(root: Path, part: int) -> Path:
    """Return the file of a part. Raises: InputError; see `cache_folder`."""
    return cache_folder() / _FOLDER / f"{name_of_folder(root)}-{RULES_VERSION}.{part % _PARTS}"


def _parts(root: Path) -> list[Path]:
    first = _part(root, 0)
    return sorted(first.parent.glob(f"{first.stem}.*"))


def _read(file: Path) -> np.ndarray:
    """Return the digests of a part, uint64[n]; empty if the file is damaged or cannot be read. Damage is logged."""
    with suppress(OSError):
        if (content := read_sealed(file)) is not None:
            return np.frombuffer(content, "<u8").astype(np.uint64)
        _log.warning("%s: damaged, and ignored; images are verified again", file)
    return np.zeros(0, np.uint64)
