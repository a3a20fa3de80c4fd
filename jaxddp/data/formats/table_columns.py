"""The labels of rows and samples, and the columns of tables: for Parquet, tar files and the library `datasets`.

The column of the images is called image or img, or is the only one with images. The column of the labels is called
label or labels or, if no column is, is the only one with class names. Labels are integers or strings.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxddp.core.errors import InputError, about, counted, nearest, show
from jaxddp.data.faults import Refuse, check_distinct, index_of_column
from jaxddp.data.formats.array_files import numbered_names
from jaxddp.data.source import Split

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
