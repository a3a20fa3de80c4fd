"""`ParquetFiles`: reads images from a column of Parquet files, in which each cell is a struct with a field `bytes`.

Files are on this machine or below a URL. They are read one row group at a time, from an object store by ranges of
bytes. The most recently used row groups stay in memory.
"""

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from jaxddp.core.errors import InputError, JaxddpError
from jaxddp.core.files import open_regular
from jaxddp.core.wording import first_line, not_installed
from jaxddp.data.storage.shards import ShardFile, ShardFolder
from jaxddp.data.storage.store import Fault

MAX_CACHED = 1 << 30
"""The largest size of all row groups in memory, in bytes."""
WRITE_AGAIN = "download it again, or write it again"


class ParquetFiles:
    """Parquet files below a directory or a URL. An offset is the number of a row in its file.

    Args:
        column: the column of structs with a field `bytes`.
        max_cached: the largest size of the row groups that stay in memory, in bytes, and of those that threads read at
            the same time. One group may be larger.
    """

    def __init__(self, folder: ShardFolder, column: str, max_cached: int = MAX_CACHED):
        self.folder, self.column = folder, column
        self._groups = _RowGroups(max_cached)
        self._layouts: dict[bytes, tuple[list[int], list[int]]] = {}

    @property
    def root(self) -> Path | None:
        return self.folder.root

    def name(self, path: bytes, offset: int = 0) -> str:
        return f"{self.folder.name(os.fsdecode(path))}, row {offset}"

    def read(self, path: bytes, offset: int = 0) -> bytes:
        file = ShardFile(self.folder, os.fsdecode(path))
        if path not in self._layouts:
            # Two threads may compute the same lists at the same time, which does no harm.
            self._layouts[path] = _layout(file)
        starts, sizes = self._layouts[path]
        number = bisect_right(starts, offset) - 1
        cells = self._groups.get((path, number), sizes[number], lambda: self._cells(file, number))
        cell = cells[offset - starts[number]].as_py()
        if not cell or not cell["bytes"]:
            raise InputError(
                f"{self.name(path, offset)}: {self.column!r} holds no bytes; write the file again with its images in it"
            )
        return cell["bytes"]

    # TensorFlow cannot read Parquet files.
    def in_graph(self) -> None: ...

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        return self.folder.faults(paths, identity)

    def _cells(self, file: ShardFile, number: int) -> Any:
        with open_parquet(file) as parquet, as_input_errors(file):
            return parquet.read_row_group(number, columns=[f"{self.column}.bytes"]).column(0)


@dataclass(eq=False)
class _Group:
    lock: Any = field(default_factory=threading.Lock)
    cells: Any = None
    """The column of structs; None until the group is read."""


class _RowGroups:
    """The most recently used row groups: at most `max_cached` bytes, or one group that is larger."""

    def __init__(self, max_cached: int):
        self._max_cached, self._cached, self._being_read = max_cached, 0, 0
        self._groups: OrderedDict[tuple[bytes, int], _Group] = OrderedDict()
        self._lock, self._room = threading.Lock(), threading.Condition()

    def get(self, key: tuple[bytes, int], size: int, read: Callable[[], Any]) -> Any:
        with self._lock:
            group = self._groups.setdefault(key, _Group())
            self._groups.move_to_end(key)
        # The first thread reads the group; other threads that need it wait.
        with group.lock:
            if group.cells is None:
                with self._reserved(size):
                    group.cells = read()
                self._count(group)
            return group.cells

    @contextmanager
    def _reserved(self, size: int) -> Iterator[None]:
        """Wait until the groups that are being read have at most `max_cached` bytes together with another group."""
        with self._room:
            self._room.wait_for(lambda: not self._being_read or self._being_read + size <= self._max_cached)
            self._being_read += size
        try:
            yield
        finally:
            with self._room:
                self._being_read -= size
                self._room.notify_all()

    def _count(self, new: _Group) -> None:
        with self._lock:
            self._cached += new.cells.nbytes
            for key, group in list(self._groups.items()):
                if self._cached <= self._max_cached:
                    return
                # A group that is being read is counted when it is complete.
                if group is not new and group.cells is not None:
                    self._cached -= group.cells.nbytes
                    del self._groups[key]


def _layout(file: ShardFile) -> tuple[list[int], list[int]]:
    """Return the first row of each row group, and its size in bytes without compression."""
    with open_parquet(file) as parquet:
        groups = [parquet.metadata.row_group(number) for number in range(parquet.num_row_groups)]
    return list(accumulate([group.num_rows for group in groups[:-1]], initial=0)), [
        group.total_byte_size for group in groups
    ]


@contextmanager
def open_parquet(file: ShardFile) -> Iterator[Any]:
    """Open a `pyarrow.parquet.ParquetFile`. Raises: InputError if it is damaged, or pyarrow is missing."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{file}: {not_installed('pyarrow', 'parquet')}") from None
    with as_input_errors(file):
        if file.folder.root is None:
            # Parts of a row group that are near each other come in one request.
            source, options = file.folder.open(file.path), {"pre_buffer": True}
        else:
            source, options = file.folder.root / file.path, {"memory_map": True}
            # pyarrow would wait for a FIFO.
            open_regular(source).close()
        parquet = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True, **options)
    with parquet:
        yield parquet


@contextmanager
def as_input_errors(file: ShardFile) -> Iterator[None]:
    """Turn an error of pyarrow in the block into an `InputError` about the file."""
    import pyarrow

    try:
        yield
    except JaxddpError:
        raise
    except FileNotFoundError:
        raise InputError(f"{file}: no such file; {WRITE_AGAIN}") from None
    # The errors of pyarrow have many classes; most are ValueErrors or OSErrors.
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = first_line(error) or type(error).__name__
        raise InputError(f"{file}: damaged, or not a Parquet file ({reason}); {WRITE_AGAIN}") from None
