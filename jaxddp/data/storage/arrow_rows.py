"""`ArrowRows`: reads images from a column of a table of the library `datasets`, whose files are mapped into memory."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.data.storage.store import Fault

_AT_ONCE = 10_000
"""The number of rows whose lengths are read at a time."""


class ArrowRows:
    """The images of one split. An offset is the number of a row.

    Args:
        where: a readable name of the split, for messages.
        rows: a `datasets.Dataset` in the format "arrow", whose only column holds structs of `bytes` and `path`.
        arrow_files: the files of the table; none if the table is not in files, or images are in other files.
    """

    def __init__(self, where: str, rows: Any, arrow_files: Sequence[Path]):
        self.where, self._rows, self._files = where, rows, [*arrow_files]

    @property
    def root(self) -> Path | None:
        return self._files[0].parent if self._files else None

    def name(self, path: bytes, offset: int = 0) -> str:
        return f"{self.where}, row {offset}"

    def read(self, path: bytes, offset: int = 0) -> bytes:
        name = self.name(path, offset)
        cell = self._rows[offset].column(0)[0].as_py() or {}
        if cell.get("bytes"):
            return cell["bytes"]
        if not cell.get("path") or not os.path.isabs(cell["path"]):
            raise InputError(f"{name}: holds no image; write the data set again with its images in it")
        with files.reading(f"{name}, {cell['path']}", "make it a readable file", missing="missing image; put it back"):
            return files.read(cell["path"])

    # TensorFlow cannot read Arrow's tables.
    def in_graph(self) -> None: ...

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        digest = hashlib.blake2b(digest_size=8)
        for file in self._files:
            try:
                status = file.stat()
            except OSError as error:
                return [(row, f"its file {file} cannot be read ({error.strerror})") for row in range(len(paths))]
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode())
        if identity is not None and self._files:
            identity[:] = int.from_bytes(digest.digest()) or 1
        return []


def image_lengths(rows: Any) -> np.ndarray:
    """Return the size of each image in bytes, int64[N]; -1 if the table does not hold its bytes. No image is read."""
    import pyarrow.compute

    lengths = np.full(len(rows), -1, np.int64)
    for start in range(0, len(rows), _AT_ONCE):
        for chunk in rows[start : start + _AT_ONCE].column(0).chunks:
            sizes = pyarrow.compute.call_function("binary_length", [chunk.field("bytes")])
            lengths[start : start + len(chunk)] = pyarrow.compute.fill_null(sizes, -1).to_numpy(zero_copy_only=False)
            start += len(chunk)
    return lengths
