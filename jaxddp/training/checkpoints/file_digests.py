"""The SHA-256 of files, in several threads."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import jaxddp.core.files as files

_THREADS = 4
_LARGE_FILE_BYTES = 1 << 20
"""A file of at least this many bytes is hashed before the checkpoint is complete."""
FileVersion = tuple[int, int, int, int]
"""Device, inode, size and modification time of a file. Renaming the file keeps them; writing to it changes them."""


def digests_of(folder: Path, names: list[str], known: Mapping[FileVersion, str] | None = None) -> Iterator[str]:
    """Yield the SHA-256 of each file in hex. A digest in `known` is used if the file has not changed."""

    def digest(name: str) -> str:
        file = folder / name
        early_digest = known.get(file_version(file.stat())) if known else None
        if early_digest is not None:
            return early_digest
        with files.open_regular(file) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    # Hashing releases Python's lock, so large files are hashed in parallel.
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(digest, names)


def file_version(status: os.stat_result) -> FileVersion:
    """Return the version of a file."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def large_files(folder: Path) -> Iterable[tuple[Path, FileVersion]]:
    """Yield the files of a folder that are hashed early, with their versions. Files that vanish are left out."""
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                if (version := file_version(Path(place, name).stat()))[2] >= _LARGE_FILE_BYTES:
                    yield Path(place, name), version
