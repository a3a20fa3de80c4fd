"""Images in a column of a table, and its labels: Parquet files, and data sets of the library `datasets`.

Each cell is a struct with a field `bytes`. Parquet files are on this machine or below a URL. They are read one row
group at a time, from an object store by ranges of bytes. The most recently used ones stay in memory.

The files of `datasets` are mapped into memory. A data set of the Hugging Face Hub is downloaded once, by one process of
each machine; the others wait, and then read its cache. The library reads the variables HF_HOME, HF_ENDPOINT, HF_TOKEN
and HF_DATASETS_OFFLINE.

`jaxddp.data.formats.listing.choose_columns` chooses the columns. Labels are integers or strings.
"""

import functools
import hashlib
import operator
import os
import sys
import threading
import time
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, JaxddpError, Unreachable, about, counted, first_line, nearest, requires, show
from jaxddp.core.phases import doing, moved
from jaxddp.core.threads import in_daemon
from jaxddp.data.faults import Refuse, check_distinct
from jaxddp.data.formats.array_files import in_order, numbered_names
from jaxddp.data.source import Split
from jaxddp.data.storage.root import Folder, FolderFile
from jaxddp.data.storage.store import Fault, ShardStore, check_regular, identity_of

MAX_CACHED = 1 << 30
"""The largest size of all cells in memory, in bytes."""
WRITE_AGAIN = "download it again, or write it again"
_AT_ONCE = 10_000
"""The number of rows whose lengths are read at a time."""
_SECONDS = 6 * 3600.0
"""The longest preparation of a data set, and the longest wait for another process that prepares it."""
_PAUSE = 0.5


class ParquetFiles(ShardStore):
    """Parquet files below a directory or a URL. An offset is the number of a row in its file.

    Args:
        column: the column of bytes, or of structs with a field `bytes`.
        max_cached: the largest size of the cells that stay in memory, in bytes, and of those that threads read at
            the same time. One group may be larger.
    """

    def __init__(self, folder: Folder, column: str, max_cached: int = MAX_CACHED):
        self.folder, self.column, self._max_cached = folder, column, max_cached
        # Two threads may read the same layout at the same time, which does no harm.
        self._layout = functools.cache(self._read_layout)
        # The group that was used last is at the end.
        self._groups: OrderedDict[tuple[bytes, int], Any] = OrderedDict()
        self._locks = defaultdict[tuple[bytes, int], threading.Lock](threading.Lock)
        self._being_read, self._changed = 0, threading.Condition()

    def read(self, path: bytes, offset: int = 0) -> bytes:
        _, starts, lengths = self._layout(path)
        number = bisect_right(starts, offset) - 1
        cell = self._group(path, number, lengths[number])[offset - starts[number]].as_py()
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        if not content:
            fault = f"{self.column!r} holds no bytes; write the images into the file"
            raise InputError(f"{self.name(path, offset)}: {fault}")
        return content

    def _read_layout(self, path: bytes) -> tuple[Any, list[int], list[int]]:
        """Return the footer, the first row of each row group, and its size in bytes without compression."""
        with open_parquet(FolderFile(self.folder, os.fsdecode(path))) as parquet:
            parts = [parquet.metadata.row_group(number) for number in range(parquet.num_row_groups)]
        starts = accumulate((part.num_rows for part in parts[:-1]), initial=0)
        return parquet.metadata, [*starts], [part.total_byte_size for part in parts]

    def _group(self, path: bytes, number: int, size: int) -> Any:
        """Return the cells of a row group. The first thread reads the group; other threads that need it wait."""
        key = path, number
        with self._locks[key]:
            with self._changed:
                cells = self._groups.pop(key, None)
            if cells is None:
                with self._changed:
                    # All that is being read, together with this group, has at most `max_cached` bytes.
                    self._changed.wait_for(lambda: not self._being_read or self._being_read + size <= self._max_cached)
                    self._being_read += size
                try:
                    cells = self._cells(path, number)
                finally:
                    with self._changed:
                        self._being_read -= size
                        self._changed.notify_all()
                with self._changed:
                    cached = cells.nbytes + sum(group.nbytes for group in [*self._groups.values()])
                    while self._groups and cached > self._max_cached:
                        cached -= self._groups.popitem(last=False)[1].nbytes
            with self._changed:
                self._groups[key] = cells
            return cells

    def _cells(self, path: bytes, number: int) -> Any:
        file = FolderFile(self.folder, os.fsdecode(path))
        with open_parquet(file) as parquet, as_input_errors(file):
            if not parquet.metadata.equals(self._layout(path)[0]):
                raise InputError(f"{file}: has changed since it was opened; start again")
            is_struct = bool(parquet.schema_arrow.field(self.column).type.num_fields)
            return parquet.read_row_group(number, columns=[self.column + ".bytes" * is_struct]).column(0)


@contextmanager
def open_parquet(file: FolderFile) -> Iterator[Any]:
    """Open a `pyarrow.parquet.ParquetFile`. Raises: InputError if it is damaged, or pyarrow is missing."""
    with requires(file, "pyarrow", "parquet"):
        import pyarrow.parquet
    with as_input_errors(file):
        # Parts of a row group that are near each other come in one request. pyarrow itself would wait for a FIFO.
        source = file.folder.open(file.path)
        parquet = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True, pre_buffer=True)
    with parquet:
        yield parquet


@contextmanager
def as_input_errors(file: FolderFile) -> Iterator[None]:
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
        raise InputError(f"{file}: damaged, or not a Parquet file ({first_line(error)}); {WRITE_AGAIN}") from None


class ArrowRows(ShardStore):
    """The images of one split. An offset is the number of a row.

    Args:
        where: a readable name of the split, for messages.
        rows: a `datasets.Dataset` in the format "arrow", whose only column holds structs of `bytes` and `path`.
        arrow_files: the files of the table; none if the table is not in files, or images are in other files.
    """

    def __init__(self, where: str, rows: Any, arrow_files: Sequence[Path]):
        self.where, self._rows, self._files = where, rows, arrow_files

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

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        # Without its files, a table that is mapped into memory can still be read.
        with suppress(OSError):
            of_files = [identity_of(os.fsencode(file.name), file.stat()) for file in self._files]
            if identity is not None and of_files:
                identity[:] = functools.reduce(operator.xor, of_files) or 1
        return []


def image_lengths(rows: Any) -> np.ndarray:
    """Return the size of each image in bytes, int64[N]; -1 if the table does not hold its bytes. No image is read."""
    import pyarrow.compute as compute

    lengths = [np.zeros(0, np.int64)]
    for start in range(0, len(rows), _AT_ONCE):
        for chunk in rows[start : start + _AT_ONCE].column(0).chunks:
            known = compute.call_function("binary_length", [chunk.field("bytes")])
            lengths.append(compute.fill_null(known, -1).to_numpy(zero_copy_only=False).astype(np.int64))
    return np.concatenate(lengths)


def import_datasets(where: str) -> Any:
    """Return the library `datasets`. Raises: InputError if it is not installed."""
    with requires(where, "datasets", "datasets"):
        import datasets
    return datasets


def is_saved(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    of_one_split = (folder / "state.json", folder / "dataset_info.json")
    return (folder / "dataset_dict.json").is_file() or all(file.is_file() for file in of_one_split)


def open_saved(folder: Path) -> Mapping[str, Any]:
    """Return the splits that `save_to_disk` wrote to a folder; a data set alone is "train". Raises: InputError."""
    datasets, where = import_datasets(str(folder)), folder
    check_regular(folder, "save the data set again")
    try:
        # The messages of Arrow do not name the damaged file.
        for where in sorted(folder.rglob("[!.]*.arrow")):
            datasets.Dataset.from_file(str(where))
        where = folder
        opened = datasets.load_from_disk(str(folder))
    # The library documents no types of errors for damaged files.
    except Exception as error:
        raise InputError(f"{where}: cannot be opened ({show(first_line(error))}); save the data set again") from None
    return opened if isinstance(opened, dict) else {"train": opened}


@functools.lru_cache(maxsize=4)
def open_prepared(name: str, config: str | None, revision: str | None) -> Mapping[str, Any]:
    """Return the splits of a data set of the hub, or of a folder with data files; download and prepare it if needed.

    Both splits of a run come from one call, so they are of one revision.

    Args:
        name: `owner/name`, `name` or a folder.
        config: the name of a configuration (subset); None for the only or default one.
        revision: a branch, tag or commit; None for the default branch.

    Raises:
        InputError: there is no such data set, or its files cannot be used.
        Unreachable: the hub does not answer, or the data set is not prepared after six hours.
    """
    address = f"hf:{name}"
    datasets = import_datasets(address)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    digest = hashlib.sha256(repr((name, config, revision)).encode()).hexdigest()[:16]
    lock = Path(datasets.config.HF_DATASETS_CACHE) / f"jaxddp-{digest}.lock"
    if Path(name).is_dir():
        check_regular(Path(name), "put the file there")
    with files.one_at_a_time(lock, _SECONDS, f"preparing {address}"), doing(f"preparing {address}"):
        try:
            return _in_thread(lambda: datasets.load_dataset(name, config, revision=revision))
        except (ConnectionError, TimeoutError) as error:
            fault = f"the hub cannot be reached, and the data set is not in the cache ({show(first_line(error))})"
            advice = "check the network, HF_ENDPOINT and HF_DATASETS_OFFLINE, and start again"
            raise Unreachable(f"{address}: {fault}; {advice}") from None
        except Exception as error:
            advice = "write hf:OWNER/NAME, with :CONFIG for one of several, and log in for a data set that needs it"
            raise InputError(f"{address}: cannot be opened ({show(first_line(error))}); {advice}") from None


def _in_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a call in a thread. Meanwhile this thread reports progress to the watchdog of the job.

    Raises: TimeoutError after `_SECONDS`.
    """
    # The thread of a download that never ends must not keep the process alive.
    result, until = in_daemon(call), time.monotonic() + _SECONDS
    while not wait([result], _PAUSE).done:
        moved()
        if time.monotonic() > until:
            raise TimeoutError(f"no end after {_SECONDS / 3600:.0f} hours")
    return result.result()


REFUSED = -2
"""The label of a rejected row."""
UNKNOWN = "-1"
"""The label of a row whose class is unknown."""


class Classes(NamedTuple):
    """The classes of all splits."""

    names: tuple[str, ...]
    numbered: bool
    """Whether an integer label is the index of a name, and not a name itself."""


class LabelCells(NamedTuple):
    """The labels of one table or shard."""

    labels: Sequence[int | str | None]
    """None for a rejected row."""
    name: Callable[[int], str]
    """Returns a readable name of a row, for messages."""


def label_type(values: Any, where: object, column: str) -> type[int] | type[str]:
    """Return the type of labels in a `pyarrow.Array`. Raises: InputError if they are neither integers nor strings."""
    import pyarrow

    is_integer = pyarrow.types.is_integer(values.type)
    if not is_integer and str(values.type) not in ("string", "large_string", "string_view"):
        raise InputError(f"{where}: {column} is of {values.type}; give one integer or one string per row")
    return int if is_integer else str


def label_cells(values: Any, where: object, column: str, refuse: Refuse) -> LabelCells:
    """Return the labels of a `pyarrow.Array`. Rows without a label are passed to `refuse`. Raises: see `label_type`."""
    label_type(values, where, column)
    labels = [label.strip() or None if isinstance(label, str) else label for label in values.to_pylist()]
    cells = LabelCells(labels, lambda row: f"{where}, row {row}")
    for row, label in enumerate(labels):
        if label is None:
            refuse(f"{cells.name(row)}: no {column}; give each row one, or leave the row out")
    return cells


def find_classes(
    names: tuple[str, ...], cells_of: Callable[[Split], Sequence[LabelCells]], where: str, refuse: Refuse
) -> Classes:
    """Return the classes of a data set: its names of classes or, without names, those of the labels.

    If a training label is a string, all labels are names, and the classes are the training labels, in the order of
    `in_order`. Otherwise the classes are numbered, up to the largest label of all splits. Names that look alike are
    passed to `refuse`.

    Args:
        cells_of: returns the labels of a split.
        where: the name of the data set, for messages.
    """
    if names:
        return Classes(names, numbered=True)
    first: dict[int | str, str] = {}
    for cells in cells_of("train"):
        for row, label in enumerate(cells.labels):
            if label is not None and label not in first:
                first[label] = cells.name(row)
    if not any(isinstance(label, str) for label in first):
        val = (label for cells in cells_of("val") for label in cells.labels if isinstance(label, int))
        with about(where):
            return Classes(numbered_names(np.array([max([*first, *val], default=0)])), numbered=True)
    places = {str(label): place for label, place in first.items() if str(label) != UNKNOWN}
    check_distinct(places, places.__getitem__, refuse)
    return Classes(tuple(in_order(places)), numbered=False)


def class_indices(cells: LabelCells, classes: Classes, refuse: Refuse) -> np.ndarray:
    """Return class indices, int32[N]; -1 if the class is unknown, which the label -1 says; `REFUSED` for other labels.

    `datasets` writes -1 in splits without labels.
    """
    names = classes.names
    index = {name: label for label, name in enumerate(map(str, range(len(names))) if classes.numbered else names)}
    index[UNKNOWN] = -1
    labels = np.full(len(cells.labels), REFUSED, np.int32)
    for row, label in enumerate(cells.labels):
        if str(label) in index and label is not None:
            labels[row] = index[str(label)]
        elif label is not None:
            hint = nearest(label, names) if isinstance(label, str) else ""
            known = counted(len(names), "class")
            refuse(f"{cells.name(row)}: label {show(label)} is none of the {known}{hint}; correct it")
    return labels
