"""Images in a column of a table, and its labels: Parquet files, and data sets of the library `datasets`.

Each cell is a struct with a field `bytes`. Parquet files are on this machine or below a URL. They are read one row
group at a time, from an object store by ranges of bytes. The most recently used row groups stay in memory.

The files of `datasets` are mapped into memory. A data set of the Hugging Face Hub is downloaded once, by one process of
each machine; the others wait, and then read its cache. The library reads the variables HF_HOME, HF_ENDPOINT, HF_TOKEN
and HF_DATASETS_OFFLINE.

The column of the images is called image or img, or is the only one with images. The column of the labels is called
label or labels or, if no column is, is the only one with class names. Labels are integers or strings.
"""

import functools
import hashlib
import os
import sys
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import (
    InputError,
    JaxddpError,
    Unreachable,
    about,
    counted,
    first_line,
    nearest,
    not_installed,
    show,
)
from jaxddp.core.files import in_turn, open_regular
from jaxddp.core.phases import doing, moved
from jaxddp.data.faults import Refuse, check_distinct, index_of_column
from jaxddp.data.formats.array_files import numbered_names
from jaxddp.data.source import Split
from jaxddp.data.storage.root import Folder
from jaxddp.data.storage.shards import ShardFile
from jaxddp.data.storage.store import Fault, check_regular, faults_of_shards

MAX_CACHED = 1 << 30
"""The largest size of all row groups in memory, in bytes."""
WRITE_AGAIN = "download it again, or write it again"
_AT_ONCE = 10_000
"""The number of rows whose lengths are read at a time."""
T = TypeVar("T")
_SECONDS = 6 * 3600.0
"""The longest preparation of a data set, and the longest wait for another process that prepares it."""
_PAUSE = 0.5


class ParquetFiles:
    """Parquet files below a directory or a URL. An offset is the number of a row in its file.

    Args:
        column: the column of structs with a field `bytes`.
        max_cached: the largest size of the row groups that stay in memory, in bytes, and of those that threads read at
            the same time. One group may be larger.
    """

    def __init__(self, folder: Folder, column: str, max_cached: int = MAX_CACHED):
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
        starts, of_groups = self._layouts[path]
        number = bisect_right(starts, offset) - 1
        cells = self._groups.get((path, number), of_groups[number], lambda: self._cells(file, number))
        cell = cells[offset - starts[number]].as_py()
        if not cell or not cell["bytes"]:
            raise InputError(
                f"{self.name(path, offset)}: {self.column!r} holds no bytes; write the images into the file"
            )
        return cell["bytes"]

    # TensorFlow cannot read Parquet files.
    def in_graph(self) -> None: ...

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        return faults_of_shards(self.folder, paths, identity)

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
        self._max_cached, self._being_read = max_cached, 0
        self._groups: OrderedDict[tuple[bytes, int], _Group] = OrderedDict()
        self._changed = threading.Condition()

    def get(self, key: tuple[bytes, int], size: int, read: Callable[[], Any]) -> Any:
        with self._changed:
            group = self._groups.setdefault(key, _Group())
            self._groups.move_to_end(key)
        # The first thread reads the group; other threads that need it wait.
        with group.lock:
            if group.cells is None:
                with self._changed:
                    # The groups that are being read have at most `max_cached` bytes together with another group.
                    self._changed.wait_for(lambda: not self._being_read or self._being_read + size <= self._max_cached)
                    self._being_read += size
                try:
                    group.cells = read()
                finally:
                    with self._changed:
                        self._being_read -= size
                        self._changed.notify_all()
                        self._forget(group)
            return group.cells

    def _forget(self, new: _Group) -> None:
        """Forget the groups that were not used for longest, but no group that is being read."""
        cached = sum(group.cells.nbytes for group in self._groups.values() if group.cells is not None)
        for key, group in [*self._groups.items()]:
            if cached <= self._max_cached:
                return
            if group is not new and group.cells is not None:
                cached -= group.cells.nbytes
                del self._groups[key]


def _layout(file: ShardFile) -> tuple[list[int], list[int]]:
    """Return the first row of each row group, and its size in bytes without compression."""
    with open_parquet(file) as parquet:
        groups = [parquet.metadata.row_group(number) for number in range(parquet.num_row_groups)]
    starts = accumulate((group.num_rows for group in groups[:-1]), initial=0)
    return [*starts], [group.total_byte_size for group in groups]


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
    import pyarrow.compute as compute

    lengths = [np.zeros(0, np.int64)]
    for start in range(0, len(rows), _AT_ONCE):
        for chunk in rows[start : start + _AT_ONCE].column(0).chunks:
            known = compute.call_function("binary_length", [chunk.field("bytes")])
            lengths.append(compute.fill_null(known, -1).to_numpy(zero_copy_only=False).astype(np.int64))
    return np.concatenate(lengths)


def import_datasets(where: str) -> Any:
    """Return the library `datasets`. Raises: InputError if it is not installed."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"{where}: {not_installed('datasets', 'datasets')}") from None
    return datasets


def is_saved(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("state.json", "dataset_info.json")
    )


def open_saved(folder: Path) -> Mapping[str, Any]:
    """Return the splits that `save_to_disk` wrote to a folder; a data set alone is "train". Raises: InputError."""
    datasets = import_datasets(str(folder))
    check_regular(folder, "save the data set again")
    try:
        opened = datasets.load_from_disk(str(folder))
    # The library documents no types of errors for damaged files.
    except Exception as error:
        where = _damaged_file(datasets, folder) or folder
        raise InputError(f"{where}: cannot be opened ({_reason(error)}); save the data set again") from None
    return opened if isinstance(opened, dict) else {"train": opened}


def _damaged_file(datasets: Any, folder: Path) -> Path | None:
    """Return the first file of a saved data set that cannot be read. The messages of Arrow do not name it."""
    for file in sorted(folder.rglob("*.arrow")):
        try:
            datasets.Dataset.from_file(str(file))
        except Exception:
            return file
    return None


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
    with in_turn(lock, _SECONDS, f"preparing {address}") as is_held, doing(f"preparing {address}"):
        if not is_held:
            raise Unreachable(f"{address}: another process still prepares it after {_SECONDS / 3600:.0f} hours; end it")
        try:
            return _in_thread(lambda: datasets.load_dataset(name, config, revision=revision), address)
        except JaxddpError:
            raise
        except (ConnectionError, TimeoutError) as error:
            fault = f"the hub cannot be reached, and the data set is not in the cache ({_reason(error)})"
            advice = "check the network, HF_ENDPOINT and HF_DATASETS_OFFLINE, and start again"
            raise Unreachable(f"{address}: {fault}; {advice}") from None
        except Exception as error:
            advice = "write hf:OWNER/NAME, with :CONFIG for one of several, and log in for a data set that needs it"
            raise InputError(f"{address}: cannot be opened ({_reason(error)}); {advice}") from None


def _in_thread(call: Callable[[], T], address: str) -> T:
    """Return the result of a call in a thread. Meanwhile this thread reports progress to the watchdog of the job."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    # The thread of a download that never ends must not keep the process alive.
    threading.Thread(target=run, daemon=True).start()
    until = time.monotonic() + _SECONDS
    while not wait([result], _PAUSE).done:
        moved()
        if time.monotonic() > until:
            raise Unreachable(f"{address}: is not prepared after {_SECONDS / 3600:.0f} hours; check the network")
    return result.result()


def _reason(error: Exception) -> str:
    return show(first_line(error) or type(error).__name__)


_IMAGES, _LABELS = ("image", "img"), ("label", "labels")
REFUSED = -2
"""The label of a rejected row."""
_UNKNOWN = "-1"


class TableColumns(NamedTuple):
    """The columns of a table that are read."""

    image: str
    label: str
    names: tuple[str, ...] | None
    """The names of the classes; None if the labels are strings, or integers without names."""


class Classes(NamedTuple):
    """The classes of all splits."""

    names: tuple[str, ...]
    numbered: bool
    """Whether an integer label is the index of a name, and not a name itself."""


class LabelCells(NamedTuple):
    """The labels of one table or shard."""

    labels: np.ndarray
    """int64[N], or an object array of str."""
    sound: np.ndarray
    """bool[N], true for each row that was not rejected."""
    name: Callable[[int], str]
    """Returns a readable name of a row, for messages."""


def choose_columns(where: str, names: Sequence[str], images: Sequence[str], classes: Sequence[str]) -> tuple[str, str]:
    """Return the names of the columns of images and of labels.

    Args:
        where: a readable name of the table, for messages.
        names: all columns.
        images: the columns that hold images.
        classes: the columns of integers with class names.

    Raises: InputError if there is no such column, or another column has the same name.
    """
    image = next((name for name in _IMAGES if name in images), images[0] if len(images) == 1 else None)
    label = next((name for name in _LABELS if name in names), classes[0] if len(classes) == 1 else None)
    if image is None or label is None:
        kind = "images (structs with a field bytes)" if image is None else "labels"
        expected = _IMAGES if image is None else _LABELS
        found = ", ".join(names)
        raise InputError(f"{where}: no column of {kind}; its columns are {found}; call one {' or '.join(expected)}")
    for name in (image, label):
        index_of_column(names, name, where)
    return image, label


def label_cells(values: Any, where: object, column: str, refuse: Refuse) -> LabelCells:
    """Return the labels of a `pyarrow.Array`. Rows without a label are passed to `refuse`.

    Raises: InputError if the values are neither integers nor strings.
    """
    import pyarrow

    kinds, sound = pyarrow.types, ~values.is_null().to_numpy(zero_copy_only=False)
    if kinds.is_integer(values.type):
        labels = values.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    elif kinds.is_string(values.type) or kinds.is_large_string(values.type):
        labels = values.fill_null("").to_numpy(zero_copy_only=False)
        sound &= np.array([bool(label.strip()) for label in labels.tolist()], bool)
    else:
        raise InputError(f"{where}: {column} is of {values.type}; give one integer or one string per row")
    cells = LabelCells(labels, sound, lambda row: f"{where}, row {row}")
    for row in np.flatnonzero(~sound).tolist():
        refuse(f"{cells.name(row)}: no {column}; give each row one, or leave the row out")
    return cells


def find_classes(
    names: tuple[str, ...] | None, cells_of: Callable[[Split], Sequence[LabelCells]], where: str, refuse: Refuse
) -> Classes:
    """Return the classes of a data set: its names of classes or, without names, those of the labels.

    If a training label is a string, all labels are names, and the classes are the sorted training labels. Otherwise the
    classes are numbered, up to the largest label of all splits. Names that look alike are passed to `refuse`.

    Args:
        cells_of: returns the labels of a split.
        where: the name of the data set, for messages.
    """
    if names:
        return Classes(names, numbered=True)
    train = cells_of("train")
    if all(cells.labels.dtype != object for cells in train):
        labels = [one.labels[one.sound] for one in (*train, *cells_of("val"))]
        with about(where):
            return Classes(numbered_names(*labels), numbered=True)
    first: dict[str, str] = {}
    for cells in train:
        for row in np.flatnonzero(cells.sound).tolist():
            label = str(cells.labels[row])
            if label not in first and label != _UNKNOWN:
                first[label] = cells.name(row)
    check_distinct(first, first.__getitem__, refuse)
    return Classes(tuple(sorted(first)), numbered=False)


def class_indices(cells: LabelCells, classes: Classes, refuse: Refuse) -> np.ndarray:
    """Return class indices, int32[N]; -1 if the class is unknown, which the label -1 says; `REFUSED` for other labels.

    `datasets` writes -1 in splits without labels.
    """
    names = classes.names
    index = {name: label for label, name in enumerate(map(str, range(len(names))) if classes.numbered else names)}
    index[_UNKNOWN] = -1
    indices = {label: index.get(str(label), REFUSED) for label in {*cells.labels.tolist()}}
    labels = np.array([indices[label] for label in cells.labels.tolist()], np.int32)
    for row in np.flatnonzero(cells.sound & (labels == REFUSED)).tolist():
        label = cells.labels.item(row)
        hint = nearest(label, names) if isinstance(label, str) else ""
        known = counted(len(names), "class")
        refuse(f"{cells.name(row)}: label {show(label)} is none of the {known}{hint}; correct it")
    return np.where(cells.sound, labels, REFUSED).astype(np.int32)
