"""The columns of a table with images and labels, for Parquet files and for data sets of the library `datasets`.

The column of the images is called image or img, or is the only one with images. The column of the labels is called
label or labels, or is the only one with class names. Labels are integers or strings.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted, nearest, show
from jaxddp.data.faults import Refuse, check_distinct, index_of_column

_IMAGES, _LABELS = ("image", "img"), ("label", "labels")
REFUSED = -2
"""The label of a rejected row."""


class TableColumns(NamedTuple):
    """The columns of a table that are read."""

    image: str
    label: str
    names: tuple[str, ...] | None
    """The names of the classes; None if the labels are strings, or integers without names."""


class LabelCells(NamedTuple):
    labels: np.ndarray
    """The labels in the table: int64[N], or an object array of str."""
    sound: np.ndarray
    """bool[N], true for each row that was not rejected."""


def choose_columns(where: str, names: Sequence[str], images: Sequence[str], classes: Sequence[str]) -> tuple[str, str]:
    """Return the names of the columns of images and of labels.

    Args:
        where: a readable name of the table, for messages.
        names: all columns.
        images: the columns that hold images.
        classes: the columns of integers with class names; if there are none, any column may hold the labels.

    Raises: InputError if there is no such column, or another column has the same name.
    """
    candidates = classes or names
    image = next((name for name in _IMAGES if name in images), images[0] if len(images) == 1 else None)
    label = next((name for name in _LABELS if name in candidates), classes[0] if len(classes) == 1 else None)
    if image is None or label is None:
        kind = "images (structs with a field bytes)" if image is None else "labels"
        expected = _IMAGES if image is None else _LABELS
        raise InputError(
            f"{where}: no column of {kind}; its columns are {', '.join(names)}; call one {' or '.join(expected)}"
        )
    for name in (image, label):
        index_of_column(names, name, where)
    return image, label


def label_cells(values: Any, where: str, column: str, refuse: Refuse) -> LabelCells:
    """Return the labels of a `pyarrow.Array`. Rows without a label are passed to `refuse`.

    Raises: InputError if the values are neither integers nor strings.
    """
    import pyarrow

    sound = ~values.is_null().to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(~sound).tolist():
        refuse(f"{where}, row {row}: no {column}; give each row one, or leave the row out")
    if pyarrow.types.is_integer(values.type):
        return LabelCells(values.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64), sound)
    if pyarrow.types.is_string(values.type) or pyarrow.types.is_large_string(values.type):
        labels = values.to_numpy(zero_copy_only=False)
        for row in [row for row in np.flatnonzero(sound).tolist() if not labels[row].strip()]:
            refuse(f"{where}, row {row}: an empty {column}; give each row one, or leave the row out")
            sound[row] = False
        return LabelCells(labels, sound)
    raise InputError(f"{where}: {column} is of {values.type}; give one integer or one string per row")


def sorted_names(tables: Mapping[Any, LabelCells], refuse: Refuse) -> tuple[str, ...]:
    """Return the sorted strings of the labels of several tables. Names that look alike are passed to `refuse`."""
    first: dict[str, str] = {}
    for where, cells in tables.items():
        for row in np.flatnonzero(cells.sound).tolist():
            first.setdefault(str(cells.labels[row]), f"{where}, row {row}")
    check_distinct(first, first.__getitem__, refuse)
    return tuple(sorted(first))


def class_indices(where: object, cells: LabelCells, names: tuple[str, ...], refuse: Refuse) -> np.ndarray:
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
        refuse(f"{where}, row {row}: label {show(label)} is none of the {classes}{hint}; correct it")
    return np.where(cells.sound & ~wrong, labels, REFUSED).astype(np.int32)
