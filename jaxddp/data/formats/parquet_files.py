"""Reads images and labels from Parquet files, as the library `datasets` writes them.

    FILE.parquet                                  one file, or a pattern; `data.val_share` makes its validation split
    ROOT/train-00000-of-00002.parquet             or ROOT/data/…, or train.parquet
    ROOT/validation-00000-of-00001.parquet        or val, or test: the first of these that exists

ROOT is a folder or the URL of an object store. `data.train` and `data.val` can name other files or patterns.
Images are in a column of bytes, or of structs with a field `bytes`. Labels are integers or strings. The names of
integer labels are in the metadata of the schema. For string labels, the classes are the sorted labels of the training
split.

Without such a column, the rows name images beside the file. Such a file, and one whose rows have several labels (in a
list, or by the config), a split or a group, is read as a listing: see `jaxddp.data.formats.listing`, which also chooses
the columns.
"""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

import jaxddp.data.formats.listing as listing
import jaxddp.data.storage.tables as tables
from jaxddp.config import DataConfig
from jaxddp.config.data_section import TABLE_KEYS
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, about, counted, show, size
from jaxddp.core.files import parse_json
from jaxddp.core.threads import map_in_threads
from jaxddp.data.faults import Refuse, pass_faults_to
from jaxddp.data.format import Place
from jaxddp.data.formats.array_files import numbered_names
from jaxddp.data.formats.splits import ShardFormat
from jaxddp.data.source import Split
from jaxddp.data.storage.root import Folder, FolderFile
from jaxddp.data.storage.shards import THREADS, record_columns
from jaxddp.data.table import ExampleTable

_PART = re.compile(r"-([0-9]+)-of-([0-9]+)")
_log = logging.getLogger("jaxddp.data")


def read_parquet(place: Place, folder: Folder, split: Split, shards: dict[Split, list[str]]) -> ExampleTable:
    """Read a split; see `Format.open`. An id is the path of the file and the number of the row.

    These are rejected: a file that is missing, damaged or without the columns; a row whose label is missing or
    names no class; and a class whose name looks like another name. The messages name file and row.

    Raises: InputError if pyarrow is not installed, or no row can be used.
    """
    parts, refuse = [FolderFile(folder, path) for path in shards.get(split, shards["train"])], place.refuse
    pattern = getattr(place.data, split) or place.data.train or place.data.val or place.shards[1]
    with pass_faults_to(refuse):
        _check_parts([] if pattern and {*"*?["}.isdisjoint(pattern) else parts)  # Named files may be some of a set's.
    if (rows := _listing(place, folder, shards)) is not None:
        val = ParquetRows(parts) if split == "val" and "val" in shards else None
        return listing.read_listing(rows, split, place.data, refuse, val, by_column="val" not in shards)
    columns, parts = _find_columns(parts, place.data, refuse)
    cells = _read_cells(parts, columns, refuse)
    if not any(len(file_cells.labels) for file_cells in cells.values()):
        raise InputError(f"{place.address}: no rows in its {split} split; give each image a row")

    def cells_of(one: Split) -> list[tables.LabelCells]:
        others = [FolderFile(folder, path) for path in shards.get(one, ())]
        return [*(cells if one == split else _read_cells(others, columns, refuse)).values()]

    classes = tables.find_classes(columns.names, cells_of, place.address, refuse)
    labels = [tables.class_indices(file_cells, classes, refuse) for file_cells in cells.values()]
    ids, path, offset = record_columns(np.array([os.fsencode(file.path) for file in cells]), [*map(len, labels)])
    if (total := sum(folder.state(file.path)[0] for file in cells)) > tables.MAX_CACHED:
        memory = f"{size(tables.MAX_CACHED)} of the column {columns.image} stay in memory"
        others = "other images are read with the rows around them; a copy by `jaxddp data pack` is faster"
        _log.warning(f"{folder.name()}: the files hold {size(total)}; {memory}, and {others}")
    store = tables.ParquetFiles(folder, columns.image)
    table = ExampleTable(store, ids, path, np.concatenate(labels), classes.names, offset=offset)
    return replace(table, reading=f"{parts[0].name}: {columns}")


class ParquetRows(listing.Listing):
    """The rows of Parquet files. The number of a row has two parts: the index of its file, and its number there."""

    separators = "\x1f"
    unknown = tables.UNKNOWN

    def __init__(self, files: Sequence[FolderFile]):
        self.files, self.file = files, files[0]
        with tables.open_parquet(self.file) as parquet:
            schema = parquet.schema_arrow
        self.header, self.images = schema.names, _image_columns(schema)
        with about(self.file):
            self.classes = _class_names(schema)
        self.lists = [field.name for field in schema if "list" in str(field.type).partition("<")[0]]

    def place(self, number: tuple[int, int]) -> str:
        return f"{self.files[number[0]]}, row {number[1]}"

    def numbered(self, column: str) -> tuple[str, ...]:
        """Return the names of the classes of a column of integers. Raises: see `tables.label_type`."""
        import pyarrow.compute as compute

        largest = []
        for file in self.files if column not in self.lists else ():
            with tables.open_parquet(file) as parquet, tables.as_input_errors(file):
                values = _column(parquet, column, file)
            if tables.label_type(values, file, column) is not int:
                return ()
            largest.append(compute.call_function("max", [values]).as_py() or 0)
        with about(self.file):
            return numbered_names(np.array([max(largest)])) if largest else ()

    def rows(self, columns: Sequence[str], refuse: Refuse) -> Iterator[list[Any]]:
        """Yield [number of the row, *texts of the columns]; the text of a cell with an image is the id of the row."""
        names = {name: self.classes.get(name, ()) for name in columns if name not in self.images}
        for index, file in enumerate(self.files):
            with tables.open_parquet(file) as parquet, tables.as_input_errors(file):
                cells = {name: _column(parquet, name, file, *columns).to_pylist() for name in names}
                count = parquet.metadata.num_rows
            for row in range(count):
                texts = {name: _text(cells[name][row], of_column) for name, of_column in names.items()}
                yield [(index, row), *(texts.get(name, f"{file.path}__{row}") for name in columns)]

    def table(self, columns: listing.Columns, rows: Sequence[listing.Row], data: DataConfig) -> ExampleTable:
        if columns.image not in self.images:
            return super().table(columns, rows, data)
        files, offset = np.array([row.number for row in rows], np.int64).reshape(-1, 2).T
        ids, paths = [row.image.encode() for row in rows], np.array([os.fsencode(file.path) for file in self.files])
        store, labels = tables.ParquetFiles(self.file.folder, columns.image), np.full(len(ids), -1, np.int32)
        reading = f"{self.file.name}: {columns}"
        return ExampleTable(store, np.array(ids), paths[files], labels, offset=offset, reading=reading)


def _text(cell: Any, names: Sequence[str]) -> str:
    if isinstance(cell, list):
        return ParquetRows.separators.join(_text(each, names) for each in cell)
    if isinstance(cell, int) and not isinstance(cell, bool) and 0 <= cell < len(names):
        return names[cell]
    return "" if cell is None else str(cell)


def _listing(place: Place, folder: Folder, shards: dict[Split, list[str]]) -> ParquetRows | None:
    """Return the rows of the training files, if they are read as a listing.

    Raises: InputError if a file is damaged, or a column and a file of their own divide the rows.
    """
    data, keys = place.data, place.data.named_columns
    keyed = data.split_column, data.group_column, data.weight_column, data.targets, data.label_separator
    is_keyed = len(keys.get("label", ())) > 1 or any(keyed)
    with suppress(*[] if is_keyed else [InputError]):  # `_find_columns` reports the file.
        rows = ParquetRows([FolderFile(folder, path) for path in shards.get("train") or shards["val"]])
        names_images = not rows.images and listing.find_column(rows.header, listing.IMAGES) is not None
        names_images |= not {*keys.get("image", ())} <= {*rows.images}
        if is_keyed or names_images or _divides(rows, data, shards):
            return rows
        columns = listing.choose_columns(rows, data)
        return rows if columns.form != "one label" or {*columns.labels} & {*rows.lists} else None
    return None


def _divides(rows: ParquetRows, data: DataConfig, shards: dict[Split, list[str]]) -> bool:
    if "val" in shards:
        listing.check_one_division(data, rows.file.name, shards["val"][0])
        return False
    return listing.divides(rows, data)


def _by_column(place: Place, folder: Folder, shards: dict[Split, list[str]]) -> bool:
    rows = _listing(place, folder, shards)
    return rows is not None and _divides(rows, place.data, shards)


def _image_columns(schema: Any) -> list[str]:
    """Return the columns of structs with a field `bytes`, or else those of bytes with the usual name of an image."""
    import pyarrow

    structs = {field.name: field.type for field in schema if pyarrow.types.is_struct(field.type)}
    binary = (pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view())
    found = [name for name, kind in structs.items() if any(one.name == "bytes" and one.type in binary for one in kind)]
    bare = [field.name for field in schema if field.type in binary]
    return found or [name for name in bare if listing.find_column([name], listing.IMAGES)]


def _check_parts(files: list[FolderFile]) -> None:
    """Check names like `train-00000-of-00002`. Raises: InputError if a part is missing or occurs twice."""
    parts: dict[tuple[str, int], list[int]] = defaultdict(list)
    for file in files:
        # A pattern may name several data sets, whose names differ before the number of the part.
        if part := _PART.search(file.name):
            parts[file.name[: part.start()], int(part[2])].append(int(part[1]))
    for (name, number), existing in parts.items():
        missing = sorted({*range(number)} - {*existing})
        if missing or len(existing) > number:
            found = f"part {missing[0]:05d} of {number} is missing" if missing else f"a part of {number} is there twice"
            raise InputError(f"{_parent(files[0])}: {found} of {name}-*.parquet; keep the files of one data set")


def _find_columns(
    files: list[FolderFile], data: DataConfig, refuse: Refuse
) -> tuple[listing.Columns, list[FolderFile]]:
    """Return the columns of the first readable file, and the files without the unreadable ones before it.

    Raises: InputError if no file can be read.
    """
    for place, file in enumerate(files):
        with pass_faults_to(refuse):
            return listing.choose_columns(ParquetRows([file]), data), files[place:]
    raise InputError(f"{_parent(files[0])}: none of {counted(len(files), 'file')} can be read; {tables.WRITE_AGAIN}")


def _class_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the class names of each column for which `datasets` wrote some.

    Raises: InputError if its metadata are damaged. Without them, the labels would be numbers without names.
    """
    text = (schema.metadata or {}).get(b"huggingface", b'{"info": {"features": {}}}')
    try:
        features = parse_json(text, dict)["info"]["features"].items()
        # The features of other columns may also be lists.
        each = ((name, one.get("feature", one)) for name, one in features if isinstance(one, dict))
        named = ((name, one) for name, one in each if isinstance(one, dict) and one.get("_type") == "ClassLabel")
        names = {name: one["names"] for name, one in named}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"its metadata of `datasets` are damaged ({error}); {tables.WRITE_AGAIN}") from None
    for name, of_column in names.items():
        if not isinstance(of_column, list) or not all(isinstance(one, str) for one in of_column):
            raise InputError(f"the names of {name} are {show(of_column)}, no list of names; {tables.WRITE_AGAIN}")
    return {name: tuple(of_column) for name, of_column in names.items() if name in schema.names and of_column}


def _read_cells(
    files: list[FolderFile], columns: listing.Columns, refuse: Refuse
) -> dict[FolderFile, tables.LabelCells]:
    """Return the labels of each file that can be read."""
    column = columns.labels[0]

    def read(file: FolderFile) -> tuple[tables.LabelCells | None, list[str]]:
        faults = list[str]()
        with pass_faults_to(faults.append), tables.open_parquet(file) as parquet, tables.as_input_errors(file):
            values = _column(parquet, column, file, columns.image)
            if (_class_names(parquet.schema_arrow).get(column) or columns.names) != columns.names:
                raise InputError(f"{file}: the names of {column} are not those of the first file; {tables.WRITE_AGAIN}")
            return tables.label_cells(values, file, column, faults.append), faults
        return None, faults

    cells = dict[FolderFile, tables.LabelCells]()
    # In a store, each file is several requests.
    threads = 1 if all(file.folder.root for file in files) else THREADS
    for file, (of_file, faults) in zip(files, map_in_threads(read, files, threads), strict=True):
        for fault in faults:
            refuse(fault)
        if of_file is not None:
            cells[file] = of_file
    return cells


def _column(parquet: Any, column: str, file: FolderFile, *beside: str) -> Any:
    """Return the values of a column, as a `pyarrow.Array`. Raises: InputError if the file lacks it or `beside`."""
    import pyarrow

    if missing := [name for name in (column, *beside) if name not in parquet.schema_arrow.names]:
        raise InputError(f"{file}: no column {missing[0]!r}, which the first file has; {tables.WRITE_AGAIN}")
    values = parquet.read(columns=[column]).column(0).combine_chunks()
    return values.dictionary_decode() if pyarrow.types.is_dictionary(values.type) else values


def _parent(file: FolderFile) -> str:
    return file.folder.name(file.path.rpartition("/")[0])


_DESCRIPTION = "a Parquet file of `datasets`, or a directory or a URL with train-*.parquet"
FORMATS.add("parquet_files")(ShardFormat(_DESCRIPTION, ".parquet", read_parquet, TABLE_KEYS, _by_column))
