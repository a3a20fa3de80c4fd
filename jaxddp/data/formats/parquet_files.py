"""Reads images and labels from Parquet files, as the library `datasets` writes them.

    FILE.parquet                                  one file, or a pattern; `data.val_share` makes its validation split
    ROOT/train-00000-of-00002.parquet             or ROOT/data/…, or train.parquet
    ROOT/validation-00000-of-00001.parquet        or val, or test: the first of these that exists

ROOT is a folder or the URL of an object store. `data.train` and `data.val` can name other files or patterns.
Images are in a column of structs with a field `bytes`. The column is called image or img, or is the only such column.
Labels are integers or strings. The names of integer labels are in the metadata of the schema. For string labels, the
classes are the sorted labels of the training split.
"""

import logging
import os
import re
from collections import defaultdict
from typing import Any

import numpy as np

import jaxddp.core.files as files
import jaxddp.data.storage.tables as tables
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, about, counted, show, size
from jaxddp.data.faults import Refuse, pass_faults_to
from jaxddp.data.format import Place
from jaxddp.data.formats.array_files import check_names
from jaxddp.data.formats.splits import ShardFormat
from jaxddp.data.source import Split
from jaxddp.data.storage.root import Folder, FolderFile
from jaxddp.data.storage.shards import record_columns
from jaxddp.data.table import ExampleTable

_PART = re.compile(r"-([0-9]+)-of-([0-9]+)")
_log = logging.getLogger("jaxddp.data")


def read_parquet(place: Place, folder: Folder, split: Split, shards: dict[Split, list[str]]) -> ExampleTable:
    """Read a split; see `Format.open`. An id is the path of the file and the number of the row.

    These are rejected: a file that is missing, damaged or without the columns; a row whose label is missing or
    names no class; and a class whose name looks like another name. The messages name file and row.

    Raises: InputError if pyarrow is not installed, or no row can be used.
    """
    parts, refuse = [FolderFile(folder, path) for path in shards[split]], place.refuse
    with pass_faults_to(refuse):
        _check_parts(parts)
    columns, parts = _find_columns(parts, refuse)
    cells = _read_cells(parts, columns, refuse)
    if not any(len(file_cells.labels) for file_cells in cells.values()):
        raise InputError(f"{place.address}: no rows in its {split} split; give each image a row")

    def cells_of(one: Split) -> list[tables.LabelCells]:
        others = [FolderFile(folder, path) for path in shards.get(one, ())]
        return [*(cells if one == split else _read_cells(others, columns, refuse)).values()]

    classes = tables.find_classes(columns.names, cells_of, place.address, refuse)
    labels = [tables.class_indices(file_cells, classes, refuse) for file_cells in cells.values()]
    in_folder = np.array([os.fsencode(file.path) for file in cells])
    example_id, path_of_row, offset = record_columns(in_folder, [len(file_cells) for file_cells in labels])
    if (total := sum(folder.state(file.path)[0] for file in cells)) > tables.MAX_CACHED:
        memory = f"{size(tables.MAX_CACHED)} of the column {columns.image} stay in memory"
        others = "other images are read with the rows around them; a copy by `jaxddp data pack` is faster"
        _log.warning(f"{folder.name()}: the files hold {size(total)}; {memory}, and {others}")
    store = tables.ParquetFiles(folder, columns.image)
    return ExampleTable(store, example_id, path_of_row, np.concatenate(labels), classes.names, offset=offset)


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


def _find_columns(files: list[FolderFile], refuse: Refuse) -> tuple[tables.TableColumns, list[FolderFile]]:
    """Return the columns of the first readable file, and the files without the unreadable ones before it.

    Raises: InputError if no file can be read.
    """
    for place, file in enumerate(files):
        with pass_faults_to(refuse):
            return _columns_of_file(file), files[place:]
    raise InputError(f"{_parent(files[0])}: none of {counted(len(files), 'file')} can be read; {tables.WRITE_AGAIN}")


def _columns_of_file(file: FolderFile) -> tables.TableColumns:
    import pyarrow

    with tables.open_parquet(file) as parquet:
        schema = parquet.schema_arrow
    structs = {field.name: field.type for field in schema if pyarrow.types.is_struct(field.type)}
    binary = (pyarrow.binary(), pyarrow.large_binary())
    images = [name for name, kind in structs.items() if any(one.name == "bytes" and one.type in binary for one in kind)]
    with about(file):
        names = _class_names(schema)
    image, label = tables.choose_columns(str(file), schema.names, images, [*names])
    check_names(names.get(label, ()), lambda place: f"{file}: the names of {label}, name {place + 1}")
    return tables.TableColumns(image, label, names.get(label) or None)


def _class_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the class names of each column for which `datasets` wrote some.

    Raises: InputError if its metadata are damaged. Without them, the labels would be numbers without names.
    """
    text = (schema.metadata or {}).get(b"huggingface", b'{"info": {"features": {}}}')
    try:
        features = files.parse_json(text, dict)["info"]["features"].items()
        # The features of other columns may also be lists.
        named = ((name, one) for name, one in features if isinstance(one, dict) and one.get("_type") == "ClassLabel")
        names = {name: one["names"] for name, one in named}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"its metadata of `datasets` are damaged ({error}); {tables.WRITE_AGAIN}") from None
    for name, of_column in names.items():
        if not isinstance(of_column, list) or not all(isinstance(one, str) for one in of_column):
            raise InputError(f"the names of {name} are {show(of_column)}, no list of names; {tables.WRITE_AGAIN}")
    return {name: tuple(of_column) for name, of_column in names.items() if name in schema.names and of_column}


def _read_cells(
    files: list[FolderFile], columns: tables.TableColumns, refuse: Refuse
) -> dict[FolderFile, tables.LabelCells]:
    """Return the labels of each file that can be read."""
    import pyarrow

    cells, column = dict[FolderFile, tables.LabelCells](), columns.label
    for file in files:
        with pass_faults_to(refuse), tables.open_parquet(file) as parquet, tables.as_input_errors(file):
            if column not in parquet.schema_arrow.names:
                raise InputError(f"{file}: no column {column!r}, which the first file has; {tables.WRITE_AGAIN}")
            if (_class_names(parquet.schema_arrow).get(column) or columns.names) != columns.names:
                raise InputError(f"{file}: the names of {column} are not those of the first file; {tables.WRITE_AGAIN}")
            values = parquet.read(columns=[column]).column(0).combine_chunks()
            if pyarrow.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            cells[file] = tables.label_cells(values, file, column, refuse)
    return cells


def _parent(file: FolderFile) -> str:
    return file.folder.name(file.path.rpartition("/")[0])


_DESCRIPTION = "a Parquet file of `datasets`, or a directory or a URL with train-*.parquet"
FORMATS.add("parquet_files")(ShardFormat(_DESCRIPTION, ".parquet", read_parquet))
