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
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, about
from jaxddp.core.wording import counted, show, size
from jaxddp.data.faults import Refuse, pass_faults_to
from jaxddp.data.format import Match, Place
from jaxddp.data.formats.array_files import check_names
from jaxddp.data.formats.splits import find_shards, has_shards
from jaxddp.data.formats.table_columns import (
    REFUSED,
    LabelCells,
    TableColumns,
    choose_columns,
    class_indices,
    find_classes,
    label_cells,
)
from jaxddp.data.source import Split
from jaxddp.data.storage.records import record_columns
from jaxddp.data.storage.shards import ShardFile, ShardFolder, with_cache
from jaxddp.data.storage.tables import MAX_CACHED, WRITE_AGAIN, ParquetFiles, as_input_errors, open_parquet
from jaxddp.data.table import ExampleTable

_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("validation", "val", "test")}
_SUFFIX = ".parquet"
_PART = re.compile(r"-([0-9]+)-of-([0-9]+)")
_log = logging.getLogger("jaxddp.data")


class ParquetTables:
    """The format of Parquet files on this machine or in an object store."""

    description = "a Parquet file of `datasets`, or a directory or a URL with train-*.parquet"

    def match(self, place: Place) -> Match:
        if place.shards is None:
            return Match.NONE
        folder, pattern = place.shards
        if any((name or "").endswith(_SUFFIX) for name in (place.data.train, place.data.val)):
            return Match.NAMED
        if folder.root is not None:
            is_file = pattern.endswith(_SUFFIX) and ({*"{*?"} & {*pattern} or (folder.root / pattern).is_file())
            return Match.WHOLE if is_file or (not pattern and _has_files(place)) else Match.NONE
        if pattern or not folder.can_list:
            return Match.NAMED if pattern.endswith(_SUFFIX) else Match.NONE
        # Permission to read an object does not include permission to list.
        with suppress(InputError):
            return Match.NAMED if _has_files(place) else Match.NONE
        return Match.NONE

    def divided(self, place: Place) -> bool:
        return bool(_files(place, "val"))

    def open(self, place: Place, split: Split) -> ExampleTable:
        """Open a split; see `Format.open`. An id is the path of the file and the number of the row.

        These are rejected: a file that is missing, damaged or without the columns; a row whose label is missing or
        names no class; and a class whose name looks like another name. The messages name file and row.

        Raises: InputError if pyarrow is not installed, or no row can be used.
        """
        assert place.shards is not None
        folder, refuse = place.shards[0], place.refuse
        parts = _files(place, split)
        if not parts:
            raise InputError(f"{folder.name()}: no files {_SPLITS[split][0]}-*.parquet; give a folder with them")
        with pass_faults_to(refuse):
            _check_parts(parts)
        columns, parts = _find_columns(parts, refuse)
        cells = _cells_by_file(parts, columns, refuse)
        if not any(len(file_cells.labels) for file_cells in cells.values()):
            raise InputError(f"{place.address}: no rows in its {split} split; give each image a row")

        def cells_of(one: Split) -> dict[ShardFile, LabelCells]:
            return cells if one == split else _cells_by_file(_files(place, one), columns, refuse)

        classes = find_classes(columns.names, cells_of, place.address, refuse)
        labels = [class_indices(file, file_cells, classes, refuse) for file, file_cells in cells.items()]
        in_folder = np.array([os.fsencode(file.path) for file in cells])
        example_id, path_of_row, offset = record_columns(in_folder, [len(file_cells) for file_cells in labels])
        _warn_if_large(folder, [*cells], columns.image)
        store, label = ParquetFiles(folder, columns.image), np.concatenate(labels)
        store = with_cache(store, folder, place.data.local_cache)
        table = ExampleTable(store, example_id, path_of_row, label, classes.names, offset=offset)
        return table.without(np.flatnonzero(label == REFUSED).tolist()).select(place.data.classes)


def _files(place: Place, split: Split) -> list[ShardFile]:
    """Return the files of a split, sorted; those that the config names, or those with the name of the split."""
    assert place.shards is not None
    folder, pattern = place.shards
    if pattern or place.data.train or place.data.val:
        return [ShardFile(folder, path) for path in find_shards(place, _SUFFIX).get(split, ())]
    for name in _SPLITS[split]:
        for where in ("", "data"):
            wanted = re.compile(rf"(?:.*/)?{name}(?:-.*)?\.parquet")
            if paths := [path for path in folder.files(where) if wanted.fullmatch(path)]:
                return [ShardFile(folder, path) for path in paths]
    return []


def _has_files(place: Place) -> bool:
    named = place.data.train or place.data.val
    return has_shards(place, _SUFFIX) if named else bool(_files(place, "train"))


def _check_parts(files: list[ShardFile]) -> None:
    """Check names like `train-00000-of-00002`.

    Raises: InputError if a part is missing or occurs twice, or the totals differ.
    """
    parts = [match for file in files if (match := _PART.search(file.name))]
    if parts and (len(parts) < len(files) or len({int(part[2]) for part in parts}) > 1):
        names = ", ".join(file.name for file in files[:4])
        raise InputError(
            f"{_parent(files[0])}: {names}: the names give different numbers of parts; keep the files of one data set"
        )
    if parts:
        number, existing = int(parts[0][2]), {int(part[1]) for part in parts}
        if missing := sorted({*range(number)} - existing):
            raise InputError(f"{_parent(files[0])}: part {missing[0]:05d} of {number} is missing; download it again")
    first: dict[str, ShardFile] = {}
    for file in files:
        # A pattern may name several data sets, whose names differ before the number of the part.
        part = _PART.search(file.name)
        if part and (other := first.setdefault(file.path.removesuffix(file.name[part.end() :]), file)) is not file:
            raise InputError(
                f"{_parent(file)}: part {part[1]} of {int(part[2])} is there twice, in {other.name} and {file.name}; "
                "keep the files of one data set"
            )


def _find_columns(files: list[ShardFile], refuse: Refuse) -> tuple[TableColumns, list[ShardFile]]:
    """Return the columns of the first readable file, and the files without the unreadable ones before it.

    Raises: InputError if no file can be read.
    """
    for place, file in enumerate(files):
        with pass_faults_to(refuse):
            return _columns_of_file(file), files[place:]
    raise InputError(f"{_parent(files[0])}: none of {counted(len(files), 'file')} can be read; {WRITE_AGAIN}")


def _columns_of_file(file: ShardFile) -> TableColumns:
    with open_parquet(file) as parquet:
        schema = parquet.schema_arrow
    images = [field.name for field in schema if _is_image(field.type)]
    with about(file):
        names = _class_names(schema)
    image, label = choose_columns(str(file), schema.names, images, [*names])
    check_names(names.get(label, ()), lambda place: f"{file}: the names of {label}, name {place + 1}")
    return TableColumns(image, label, names.get(label) or None)


def _is_image(kind: Any) -> bool:
    import pyarrow

    if not pyarrow.types.is_struct(kind):
        return False
    fields = {field.name: field.type for field in kind}
    return "bytes" in fields and (
        pyarrow.types.is_binary(fields["bytes"]) or pyarrow.types.is_large_binary(fields["bytes"])
    )


def _class_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the class names of each column for which `datasets` wrote some.

    Raises: InputError if its metadata are damaged. Without them, the labels would be numbers without names.
    """
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return {}
    try:
        features = files.parse_json(text, dict)["info"]["features"].items()
        # The features of other columns may also be lists.
        named = {name: feature for name, feature in features if isinstance(feature, dict)}
        names = {name: one["names"] for name, one in named.items() if one.get("_type") == "ClassLabel"}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"its metadata of `datasets` are damaged ({error}); {WRITE_AGAIN}") from None
    for name, of_column in names.items():
        if not isinstance(of_column, list) or not all(isinstance(one, str) for one in of_column):
            raise InputError(f"the names of {name} are {show(of_column)}, no list of names; {WRITE_AGAIN}")
    return {name: tuple(of_column) for name, of_column in names.items() if name in schema.names and of_column}


def _cells_by_file(files: list[ShardFile], columns: TableColumns, refuse: Refuse) -> dict[ShardFile, LabelCells]:
    """Return the labels of each file that can be read."""
    cells: dict[ShardFile, LabelCells] = {}
    for file in files:
        with pass_faults_to(refuse):
            cells[file] = _read_cells(file, columns, refuse)
    return cells


def _read_cells(file: ShardFile, columns: TableColumns, refuse: Refuse) -> LabelCells:
    import pyarrow

    column = columns.label
    with open_parquet(file) as parquet, as_input_errors(file):
        if column not in parquet.schema_arrow.names:
            raise InputError(f"{file}: no column {column!r}, which the first file has; {WRITE_AGAIN}")
        if (names := _class_names(parquet.schema_arrow).get(column)) and names != columns.names:
            pairs = enumerate(zip_longest(names, columns.names or ()))
            place, (name, first) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
            raise InputError(
                f"{file}: class {place} of {column} is {show(name)}, and {show(first)} in the first file; write all "
                "files with the same names in the same order"
            )
        values = parquet.read(columns=[column]).column(0).combine_chunks()
        if pyarrow.types.is_dictionary(values.type):
            values = values.dictionary_decode()
    return label_cells(values, str(file), column, refuse)


def _parent(file: ShardFile) -> str:
    return file.folder.name(file.path.rpartition("/")[0])


def _warn_if_large(folder: ShardFolder, files: list[ShardFile], image: str) -> None:
    total = sum(file.size for file in files)
    if total > MAX_CACHED:
        _log.warning(
            f"{folder.name()}: the files hold {size(total)}; {size(MAX_CACHED)} of the column {image} stay in memory, "
            "and each other image is read with its whole row group; training from a copy by `jaxddp data pack` is "
            "faster"
        )


FORMATS.add("parquet")(ParquetTables())
