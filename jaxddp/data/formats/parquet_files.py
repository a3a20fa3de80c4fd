"""Reads images and labels from Parquet files, as the library `datasets` writes them.

    FILE.parquet                                  one file alone; `data.val_share` makes its validation split
    ROOT/train-00000-of-00002.parquet             or ROOT/data/…, or train.parquet
    ROOT/validation-00000-of-00001.parquet        or val, or test: the first of these that exists

Images are in a column of structs with a field `bytes`. The column is called image or img, or is the only such column.
Labels are integers or strings. The names of integer labels are in the metadata of the schema. For string labels, the
classes are the sorted labels of the training split.
"""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxddp.core.errors import InputError, about
from jaxddp.core.wording import counted, nearest, show, size
from jaxddp.data.faults import Refuse, check_distinct, index_of_column, pass_faults_to, raise_fault
from jaxddp.data.format import LocalFormat
from jaxddp.data.formats.array_files import numbered_names
from jaxddp.data.source import Split
from jaxddp.data.storage.parquet import MAX_CACHED, WRITE_AGAIN, ParquetFiles, as_input_errors, open_parquet
from jaxddp.data.storage.records import record_columns
from jaxddp.data.table import ExampleTable
from jaxddp.registry import FORMATS

_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("validation", "val", "test")}
_IMAGES, _LABELS = ("image", "img"), ("label", "labels")
_PART = re.compile(r"-([0-9]+)-of-([0-9]+)")
_REFUSED = -2
"""The label of a rejected row."""
_log = logging.getLogger("jaxddp.data")


class _Cells(NamedTuple):
    labels: np.ndarray
    """The labels in the file: int64[N], or an object array of str."""
    sound: np.ndarray
    """bool[N], true for each row that was not rejected."""


class _Columns(NamedTuple):
    image: str
    label: str
    names: tuple[str, ...] | None
    """The names of the classes; None if the schema has none."""


def holds_parquet(path: Path) -> bool:
    """Return whether the path is a Parquet file, or a folder with a training split of such files."""
    return path.suffix == ".parquet" if path.is_file() else bool(_files(path, "train"))


def is_divided(path: Path) -> bool:
    """Return whether the folder holds files of a validation split."""
    return not path.is_file() and bool(_files(path, "val"))


def read_parquet(path: Path, split: Split, refuse: Refuse = raise_fault) -> ExampleTable:
    """Read the labels of one split; no image is read. An id is the name of the file and the number of the row.

    These are rejected: a file that is missing, damaged or without the columns; a row whose label is missing or names
    no class; and a class whose name looks like another name. The messages name file and row.

    Raises: InputError if pyarrow is not installed, or no row can be used.
    """
    root = path.parent if path.is_file() else path
    files = [path] if path.is_file() else _files(path, split)
    if not files:
        raise InputError(f"{path}: no files {_SPLITS[split][0]}-*.parquet; give a folder with them")
    with pass_faults_to(refuse):
        _check_parts(files)
    columns, files = _find_columns(files, refuse)
    cells = _cells_by_file(files, columns.label, refuse)
    if not any(len(file_cells.labels) for file_cells in cells.values()):
        raise InputError(f"{path}: no rows in its {split} split; give each image a row")
    names = columns.names or _class_names(path, cells, split, columns.label, refuse)
    labels = [_class_indices(file, file_cells, names, refuse) for file, file_cells in cells.items()]
    in_root = np.array([os.fsencode(file.relative_to(root).as_posix()) for file in cells])
    example_id, path_of_row, offset = record_columns(in_root, [len(file_cells) for file_cells in labels])
    _warn_if_large(path, [*cells], columns.image)
    label = np.concatenate(labels)
    table = ExampleTable(ParquetFiles(root, columns.image), example_id, path_of_row, label, names, offset=offset)
    return table.without(np.flatnonzero(label == _REFUSED).tolist())


def _files(folder: Path, split: Split) -> list[Path]:
    for name in _SPLITS[split]:
        for place in (folder, folder / "data"):
            paths = [*place.glob(f"{name}.parquet"), *place.glob(f"{name}-*.parquet")]
            if paths:
                return sorted(paths)
    return []


def _check_parts(files: list[Path]) -> None:
    """Check names like `train-00000-of-00002`. Raises: InputError if a part is missing, or the totals differ."""
    parts = [match for file in files if (match := _PART.search(file.name))]
    if parts and (len(parts) < len(files) or len({int(part[2]) for part in parts}) > 1):
        names = ", ".join(file.name for file in files[:4])
        raise InputError(
            f"{files[0].parent}: {names}: the names give different numbers of parts; keep the files of one data set"
        )
    if parts:
        number, existing = int(parts[0][2]), {int(part[1]) for part in parts}
        if missing := sorted({*range(number)} - existing):
            raise InputError(f"{files[0].parent}: part {missing[0]:05d} of {number} is missing; download it again")


def _find_columns(files: list[Path], refuse: Refuse) -> tuple[_Columns, list[Path]]:
    """Return the columns of the first readable file, and the files without the unreadable ones before it.

    Raises: InputError if no file can be read.
    """
    for place, file in enumerate(files):
        with pass_faults_to(refuse):
            return _columns_of_file(file), files[place:]
    raise InputError(f"{files[0].parent}: none of {counted(len(files), 'file')} can be read; {WRITE_AGAIN}")


def _columns_of_file(file: Path) -> _Columns:
    with open_parquet(file) as parquet:
        schema = parquet.schema_arrow
    images = [field.name for field in schema if _is_image(field.type)]
    image = next((name for name in _IMAGES if name in images), images[0] if len(images) == 1 else None)
    features = _features(schema.metadata)
    classes = [name for name in schema.names if features.get(name, {}).get("_type") == "ClassLabel"]
    candidates = classes or schema.names
    label = next((name for name in _LABELS if name in candidates), classes[0] if len(classes) == 1 else None)
    if image is None or label is None:
        kind = "images (structs with a field bytes)" if image is None else "labels"
        expected = _IMAGES if image is None else _LABELS
        raise InputError(
            f"{file}: no column of {kind}; its columns are {', '.join(schema.names)}; call one {' or '.join(expected)}"
        )
    for name in (image, label):
        index_of_column(schema.names, name, str(file))
    names = features.get(label, {}).get("names") if label in classes else None
    if names:
        check_distinct(map(str, names), lambda name: f"{file}: the names of {label}")
    return _Columns(image, label, tuple(map(str, names)) if names else None)


def _is_image(kind: Any) -> bool:
    import pyarrow

    if not pyarrow.types.is_struct(kind):
        return False
    fields = {field.name: field.type for field in kind}
    return "bytes" in fields and (
        pyarrow.types.is_binary(fields["bytes"]) or pyarrow.types.is_large_binary(fields["bytes"])
    )


def _features(metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """Return the features of the columns that `datasets` wrote; empty if it wrote none."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return {name: feature for name, feature in features.items() if isinstance(feature, dict)}


def _cells_by_file(files: list[Path], column: str, refuse: Refuse) -> dict[Path, _Cells]:
    """Return the labels of each file that can be read."""
    cells: dict[Path, _Cells] = {}
    for file in files:
        with pass_faults_to(refuse):
            cells[file] = _read_cells(file, column, refuse)
    return cells


def _read_cells(file: Path, column: str, refuse: Refuse) -> _Cells:
    import pyarrow

    with open_parquet(file) as parquet, as_input_errors(file):
        if column not in parquet.schema_arrow.names:
            raise InputError(f"{file}: no column {column!r}, which the first file has; {WRITE_AGAIN}")
        values = parquet.read(columns=[column]).column(0).combine_chunks()
        if pyarrow.types.is_dictionary(values.type):
            values = values.dictionary_decode()
    sound = ~values.is_null().to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(~sound).tolist():
        refuse(f"{file}, row {row}: no {column}; give each row one, or leave the row out")
    if pyarrow.types.is_integer(values.type):
        return _Cells(values.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64), sound)
    if pyarrow.types.is_string(values.type) or pyarrow.types.is_large_string(values.type):
        labels = values.to_numpy(zero_copy_only=False)
        for row in [row for row in np.flatnonzero(sound).tolist() if not labels[row].strip()]:
            refuse(f"{file}, row {row}: an empty {column}; give each row one, or leave the row out")
            sound[row] = False
        return _Cells(labels, sound)
    raise InputError(f"{file}: {column} is of {values.type}; give one integer or one string per row")


def _class_names(path: Path, cells: dict[Path, _Cells], split: Split, column: str, refuse: Refuse) -> tuple[str, ...]:
    """Return the class names if the schema has none: numbers, or the label strings of the training split."""
    train_cells = cells if split == "train" else _cells_by_file(_files(path, "train"), column, refuse)
    if any(file_cells.labels.dtype == object for file_cells in train_cells.values()):
        first: dict[str, str] = {}
        for file, file_cells in train_cells.items():
            for row in np.flatnonzero(file_cells.sound).tolist():
                first.setdefault(str(file_cells.labels[row]), f"{file}, row {row}")
        check_distinct(first, first.__getitem__, refuse)
        return tuple(sorted(first))
    val_cells = {} if path.is_file() or split == "val" else _cells_by_file(_files(path, "val"), column, refuse)
    with about(str(path)):
        return numbered_names(
            *(
                file_cells.labels[file_cells.sound]
                for files in (cells, train_cells, val_cells)
                for file_cells in files.values()
            )
        )


def _class_indices(file: Path, cells: _Cells, names: tuple[str, ...], refuse: Refuse) -> np.ndarray:
    """Return class indices, int32[N]; -1 if the class is unknown. `datasets` writes -1 in splits without labels."""
    if cells.labels.dtype == object:
        index = {name: label for label, name in enumerate(names)}
        labels = np.array([index.get(str(label), len(names)) for label in cells.labels.tolist()], np.int64)
    else:
        labels = cells.labels
    wrong = cells.sound & ((labels < -1) | (labels >= len(names)))
    for row in np.flatnonzero(wrong).tolist():
        label = cells.labels.item(row)
        hint = nearest(label, names) if isinstance(label, str) else ""
        classes = counted(len(names), "class")
        refuse(f"{file}, row {row}: label {show(label)} is none of the {classes}{hint}; correct it")
    return np.where(cells.sound & ~wrong, labels, _REFUSED).astype(np.int32)


def _warn_if_large(path: Path, files: list[Path], image: str) -> None:
    total = sum(file.stat().st_size for file in files)
    if total > MAX_CACHED:
        _log.warning(
            f"{path}: the files hold {size(total)}; {size(MAX_CACHED)} of the column {image} stay in memory, and each "
            "other image is read with its whole row group; training from a copy by `jaxddp data pack` is faster"
        )


FORMATS.add("parquet")(
    LocalFormat(
        "a Parquet file of `datasets` or a directory with train-*.parquet",
        holds_parquet,
        read_parquet,
        is_divided,
        skips_faults=True,
    )
)
