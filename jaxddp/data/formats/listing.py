"""Makes a table of images of rows that name them: the rows of a CSV file, or those of a Parquet file without images.

`data.columns` names the columns; others have usual names (`IMAGES` and `LABELS`). If only one of the two is found, and
the table has one more column, that is the other. Without a column of labels, each column of 0 and 1 is a class. With
`data.targets`, each column of labels holds the shares of a class or numbers to predict.

An image is below the folder of the table, or at an absolute path. If the first images are not where their rows say,
they are looked for in the folders beside the table, and with the suffixes of images.
"""

import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key, appearance, choices, counted, nearest, show, some
from jaxddp.data.faults import Refuse, check_columns, check_distinct, find_repeats, raise_fault
from jaxddp.data.formats.array_files import are_numbers, check_names, in_order
from jaxddp.data.formats.folders import is_image_name, visible_folders
from jaxddp.data.formats.splits import SPLITS
from jaxddp.data.source import FLOATS, ClassSelection, LabelForm, Split, float_labels
from jaxddp.data.storage.root import FolderFile
from jaxddp.data.storage.store import LocalFiles
from jaxddp.data.table import ExampleTable

IMAGES = ("path", "file_name", "file_path", "file_paths", "fname", "file", "image", "image_path")
IMAGES += ("image_name", "image_index", "image_id", "id", "id_code", "img")
"""The usual names of the column of images; the first one that a table has is used."""
LABELS = ("label", "labels", "class", "category", "target", "diagnosis", "species", "class_name", "class_id")
LABELS += ("finding_labels", "dx")
_DIVIDER = "split"
_BITS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
_UNSURE = ("", "nan", "-1", "-1.0")
# A column of 0 and 1 with such a name divides the rows, and is no class.
_DIVIDERS = re.compile(r"(is)?(fold|group|split|partition|train|val|valid|validation|test)")
_PLAIN = re.compile(r"[^\x00-\x20./\x7f][^\x00-\x1f./\x7f]{0,200}+(?:[/.][^\x00-\x1f./\x7f]{1,200}+){0,9}")
_TEXT = re.compile(r"[^\x00-\x1f\x7f]{1,1000}")
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp")
_LOOKED_AT = 3
"""The number of rows whose images are looked for."""


@dataclass(eq=False)
class Listing:
    """A table whose rows name images, or hold them.

    Attributes:
        file: the file of the rows, or the first of several files.
        header: the names of the columns.
        images: the columns that hold the images themselves; none if rows name files.
        classes: the names of the classes, in their order, of each column for which the file has some.
        top: the place of the header, for messages.
    """

    file: Any
    header: Sequence[str]
    images: Sequence[str] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    separators: ClassVar[str] = ";|"
    """The characters that separate several labels in a cell, unless the config names another separator."""
    unknown: ClassVar[str | None] = None
    """The label of an image whose class is unknown."""

    @property
    def top(self) -> str:
        return str(self.file)

    def rows(self, columns: Sequence[str], refuse: Refuse) -> Iterator[list[Any]]:
        """Yield [number of the row, *texts of the columns] for each row that is not rejected.

        By default, the header is the only row, so no column is taken for one of 0 and 1.
        """
        yield [1, *columns]

    def place(self, number: Any) -> str:
        """Return a readable name of a row."""
        return f"{self.file}:{number}"

    def table(self, columns: "Columns", rows: Sequence["Row"], data: DataConfig) -> ExampleTable:
        """Return the images of some rows, without labels. Raises: InputError; see `_find_images`."""
        images = [row.image for row in rows]
        if self.file.folder.root is None:
            raise InputError(f"{self.file}: its rows name images; below a URL, write the images into its rows")
        root = Path(self.file.folder.name(self.file.path)).parent
        if any(paths := [image for image in images if "\\" in image]) and not (root / paths[0]).exists():
            images = [image.replace("\\", "/") for image in images]
        (folder, *beside), suffix, _ = _find_images(self.file, root, images[:_LOOKED_AT], data)
        ids = [image.removeprefix(f"{root}/") for image in images]
        names = [f"{image.removesuffix(suffix)}{suffix}" for image in ids]
        # The images may be divided among several folders.
        folders = {name: each for each in (*beside, folder) for name in os.listdir(root / each)} if beside else {}
        paths = [os.path.join(folders.get(name, folder), name) for name in names]
        used = some([f"{each}/" for each in sorted({folders.get(name, folder) for name in names}) if each])
        if any(path.startswith("/") for path in paths):
            paths, root = [os.path.join(root, path)[1:] for path in paths], Path("/")
        found = [f"images in {used}"] if used else []
        found += [f"suffix {suffix}"] if suffix else []
        columns_of_table = (np.array([text.encode() for text in column], "S") for column in (ids, paths))
        reading = f"{self.file.name}: {', '.join([str(columns), *found])}"
        labels = np.full(len(ids), -1, np.int32)
        return ExampleTable(LocalFiles(root), *columns_of_table, labels=labels, reading=reading)

    def numbered(self, column: str) -> tuple[str, ...]:
        """Return the names of the classes whose indices are in a column; none for other labels."""
        return ()

    def column(self, key: str, name: str) -> str:
        """Return the column that a key of the config names. Raises: InputError if there is none."""
        column = find_column(self.header, [name])
        if column is None:
            fault = f": {self.file} has no column {show(name)}"
            raise InputError(Key(f"data.{key}"), fault, advice=choices(name, self.header))
        return column


class Columns(NamedTuple):
    """The names of the columns that are read."""

    image: str
    labels: tuple[str, ...] = ()
    group: str | None = None
    divider: str | None = None
    form: LabelForm = "one label"
    """The form of labels whose columns are classes, or numbers. "one label" if the cells name the classes."""
    weight: str | None = None
    names: tuple[str, ...] = ()
    """The names of the classes in the column of labels, in their order; none if the labels alone tell them."""

    def __str__(self) -> str:
        held = "0 and 1" if self.form == "several labels" else self.form
        of_columns = f"{counted(len(self.labels), 'column')} of {held} ({some(self.labels)})"
        labels = map("label={}".format, self.labels) if self.form == "one label" else [of_columns]
        return ", ".join((f"image={self.image}", *labels, *([f"split={self.divider}"] if self.divider else [])))


class Row(NamedTuple):
    """The image, the labels (with `data.targets`, floats), the group and the weight of a row."""

    number: Any
    image: str
    labels: tuple[Any, ...]
    group: str
    weight: float


def read_listing(
    listing: Listing, split: Split, data: DataConfig, refuse: Refuse, val: Listing | None = None, by_column: bool = True
) -> ExampleTable:
    """Return the examples of a split. No image is opened.

    Ids are the paths of the rows, without `./`. If a row has several labels, the labels are multi-hot. The classes are
    the labels of the training rows, or of all folds, in the order of `in_order`, or the columns of 0 and 1.

    These rows are rejected, with a message that names the file and the line:

    - a row without a path or without a label;
    - a row whose path has `..`, or leads by a link out of the folder;
    - a row whose image is listed already, with another label, weight or group;
    - a row whose label looks like another label;
    - a row of the validation with a label that no row of the training has.

    Args:
        listing: the rows of the training split, or of both splits.
        val: the rows of the validation split, if they are in another file and wanted.
        by_column: whether a column may divide the rows; see `division`.

    Raises: InputError if a column is missing, or no row can be used.
    """
    divider, values = division(listing, data) if by_column else (None, dict[Split, list[str]]())
    columns = choose_columns(listing, data, divider)
    rows = seen = _read_rows(listing, columns, data, refuse, values.get("train"))
    if data.val_fold is not None and values:  # A fold may have all images of a class.
        seen = _read_rows(listing, columns, data, lambda fault: None, [*values["train"], *values["val"]])
    listed, is_of_classes = listing, data.targets is None
    numbered = listing.numbered(columns.labels[0]) if columns.form == "one label" and not columns.names else ()
    of_unknown = listing.unknown if all(len(row.labels) == 1 for row in rows) else None
    labelled = [(label, row) for row in reversed(seen) for label in row.labels if is_of_classes and label != of_unknown]
    first = {label: row.number for label, row in labelled}
    names = columns.labels if columns.form != "one label" else columns.names or numbered or in_order(first)
    check_distinct(sorted(first, key=first.__getitem__), lambda name: listing.place(first[name]), refuse, _look)
    if split == "val":
        if val is not None:
            listed, named = val, data.columns
            if columns.form != "one label":  # Both splits have the same columns of labels.
                image = (text for text in data.columns if text.startswith("image"))
                named = (*image, *(f"label={name}" for name in columns.labels))
            columns = choose_columns(val, replace(data, columns=named, weight_column=None))
        rows = _read_rows(listed, columns, data, refuse, values.get("val"))
    known, index = [], {name: label for label, name in enumerate(names)}
    if of_unknown is not None:
        index[of_unknown] = -1
    for row in rows:
        if is_of_classes and (unknown := [label for label in row.labels if label not in index]):
            label = f"{show(unknown[0])}{nearest(unknown[0], index)}"
            fault = f"no row of {listing.file.name} has the label {label}"
            if numbered:
                fault = f"label {unknown[0]} is none of the {counted(len(names), 'class')}"
            refuse(f"{listed.place(row.number)}: {fault}; correct it")
        else:
            known.append(row)
    multi_hot = columns.form != "one label" or any(len(row.labels) > 1 for row in known)
    labels = _label_array(known, index, len(names), data.targets or ("several labels" if multi_hot else "one label"))
    table = listed.table(columns, known, data)
    group = np.array([row.group.encode() for row in known], "S") if columns.group else None
    weights = np.array([row.weight for row in known], np.float32) if columns.weight else None
    more: Any = {"group": group, "weights": weights, "label_form": data.targets}
    table = replace(table, labels=labels, class_ids=tuple(names), class_names=tuple(names), **more)
    return sound_rows(table, lambda row: listed.place(known[row].number), refuse)


def _look(label: str) -> str:
    """Return a normal form of a label: the value of a whole number, which a table may hold as 1 and as 1.0."""
    return str(int(label.removesuffix(".0"))) if are_numbers([label]) else appearance(label)


def _label_array(rows: Sequence[Row], index: Mapping[str, int], num_classes: int, form: LabelForm) -> np.ndarray:
    """Return the labels of rows in a form; `index` has the numbers of the classes."""
    if form in FLOATS:
        return float_labels(np.array([row.labels for row in rows]), form)
    if form == "one label":
        return np.array([index[row.labels[0]] if row.labels else -1 for row in rows], np.int32)
    labels = np.zeros((len(rows), num_classes), np.uint8)
    for row, of_row in zip(rows, labels, strict=True):
        of_row[[index[label] for label in row.labels]] = 1
    return labels


def read_images(listing: Listing, data: DataConfig) -> ExampleTable:
    """Return the images alone, whose labels are -1. Raises: InputError if a row has no path, or that of another row."""
    header = listing.header
    image = find_column(header, (*data.named_columns.get("image", ()), *IMAGES))
    names = [name for name in header if not is_image_name(name)]  # The first line may be a row.
    image = image or next((name for name in names if finds_images(listing, data, name)), None)
    if image is None and len(header) != 1:
        fault = f"{listing.top}: no column {IMAGES[0]}, found {some([*map(show, header)], 12) or 'none'}"
        raise InputError(f"{fault}; call the column of images {' or '.join(IMAGES[:4])}")
    image = image or header[0]
    rows = _read_rows(listing, Columns(image), data, raise_fault)
    table = listing.table(Columns(image), rows, data)
    return sound_rows(table, lambda row: listing.place(rows[row].number), raise_fault)


# --- Columns ---


def find_column(header: Sequence[str], names: Iterable[str]) -> str | None:
    """Return the first column with one of some names; case, blanks, hyphens and underscores do not count."""
    folded = {_folded(name): name for name in reversed(header)} | {name: name for name in header}
    return next((folded[key] for name in names for key in (name, _folded(name)) if key in folded), None)


def _folded(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).casefold()


def has_labels(listing: Listing, data: DataConfig) -> bool:
    """Return whether a table has a column of labels by its name, or columns of shares or numbers."""
    names = (*data.named_columns.get("label", ()), *LABELS)
    return data.targets is not None or find_column(listing.header, names) is not None


def finds_images(listing: Listing, data: DataConfig, image: str | None = None) -> bool:
    """Return whether an image is where one of the first rows of a table, or of a column, says, or is looked for."""
    root = Path(listing.file.folder.name(listing.file.path)).parent
    names, found = (*data.named_columns.get("image", ()), *IMAGES), False
    with suppress(InputError):
        image = image or find_column(listing.header, names) or choose_columns(listing, data).image
        rows = itertools.islice(listing.rows([image], lambda fault: None), _LOOKED_AT)
        images = [text.replace("\\", "/") for _, text in rows]
        # An image that is in two places is an error there.
        found = True
        _, _, found = _find_images(listing.file, root, images, data)
    return found


def choose_columns(listing: Listing, data: DataConfig, divider: str | None = None) -> Columns:
    """Return the columns of a table with labels. Raises: InputError if there is none, or another has the same name."""
    header = listing.header
    named = {role: [listing.column("columns", each) for each in names] for role, names in data.named_columns.items()}
    group = None if data.group_column is None else listing.column("group_column", data.group_column)
    image = named["image"][0] if "image" in named else find_column(listing.images or header, IMAGES)
    weight = None if data.weight_column is None else listing.column("weight_column", data.weight_column)
    image = image or (listing.images[0] if len(listing.images) == 1 else None)
    labels = named.get("label") or [*filter(None, [find_column(header, LABELS)])]
    labels = labels or ([*listing.classes] if len(listing.classes) == 1 else [])
    rest = [name for name in header if name not in (image, *labels, group, divider, weight)]
    rest = [name for name in rest if not _DIVIDERS.fullmatch(_folded(name))]
    if len(rest) == 1 and (image is None) != (not labels):
        image, labels = image or rest[0], labels or rest
    form: LabelForm = data.targets or ("several labels" if len(labels) > 1 or not labels else "one label")
    if image is not None and not labels:
        labels = rest if data.targets else _classes(listing, rest)
    if image is None or not labels:
        role = "label" if image else "image"
        found = some([*map(show, header)], 12) or "an empty line"
        fault = f"{listing.top}: no column of {role}s by a usual name, found {found}"
        raise InputError(fault, advice=("name one by ", Key("data.columns"), f" {role}=NAME"))
    check_columns(header, [*filter(None, (image, *labels, group, divider, weight))], listing.top)
    names = () if form != "one label" else listing.classes.get(labels[0], ())
    check_names(names, lambda place: f"{listing.top}: the names of {labels[0]}, name {place + 1}")
    return Columns(image, tuple(labels), group, divider, form, weight, names)


def _classes(listing: Listing, names: Sequence[str]) -> list[str]:
    """Return the columns of 0 and 1, if there are two. Raises: InputError if another one has an empty cell or -1."""
    # The number of the first row with each text; None stands for the texts of other columns.
    first_rows = {name: dict[str | None, Any]() for name in names}
    for number, *cells in listing.rows(names, lambda fault: None):
        for name, cell in zip(names, cells, strict=True):
            bit = cell.strip().lower()
            first_rows[name].setdefault(bit if bit in _BITS or bit in _UNSURE else None, number)
    classes = [name for name, found in first_rows.items() if found.keys() <= _BITS.keys()]
    for name, found in first_rows.items():
        unsure = found.keys() - _BITS.keys()
        if len(classes) > 1 and None not in found and unsure and unsure < found.keys():
            number, cell = min((found[cell], str(cell)) for cell in unsure)
            fault = f"{listing.place(number)}: {show(cell)} in column {show(name)} of 0 and 1; write 0 or 1, or name "
            raise InputError(fault, "the columns of labels by ", Key("data.columns"), " label=NAME")
    return classes if len(classes) > 1 else []


def division(listing: Listing, data: DataConfig) -> tuple[str | None, dict[Split, list[str]]]:
    """Return the column that divides the rows, and its values in each split; None and no values if no column does.

    A column called split does so if all its values are names of splits.

    Raises: InputError if the config's column or value is missing, or values are no names of splits.
    """
    if data.split_column is not None:
        column = listing.column("split_column", data.split_column)
    elif (column := find_column(listing.header, [_DIVIDER])) is None:
        return None, {}
    values = sorted({cell.strip() for _, cell in listing.rows([column], lambda fault: None)})
    of = {split: [value for value in values if value.casefold() in names] for split, names in SPLITS.items()}
    if data.val_fold is not None:
        if data.val_fold not in values:
            fault = f": column {column} of {listing.file} has no such value"
            raise InputError(Key("data.val_fold", data.val_fold), fault, advice=choices(data.val_fold, values[:20]))
        others = [value for value in values if value != data.val_fold]
        return column, {"train": [each for each in others if each in of["train"]] or others, "val": [data.val_fold]}
    if len(of["train"]) + len(of["val"]) == len(values):
        # Where a set has all three, the test split is for predictions.
        val = [value for value in of["val"] if not value.casefold().startswith("test")]
        return column, {"train": of["train"], "val": val or of["val"]}
    if data.split_column is None:
        return None, {}
    fault = f": its values in {listing.file} are {some(values, 12)}"
    advice = ("give the one to validate on by ", Key("data.val_fold"))
    raise InputError(Key("data.split_column", data.split_column), fault, advice=advice)


def divides(listing: Listing, data: DataConfig) -> bool:
    """Return whether a column divides the rows into both splits. Raises: see `division`."""
    _, values = division(listing, data)
    return bool(values.get("val"))


def check_one_division(data: DataConfig, file: str, val: str) -> None:
    """Raise an `InputError` about a column that divides a file which has a validation file, too."""
    if data.split_column is not None:
        fault = f": {file} has its validation split in {val}"
        advice = ("leave ", Key("data.split_column"), f" out, or move {val} away")
        raise InputError(Key("data.split_column", data.split_column), fault, advice=advice)


# --- Rows ---


def _read_rows(
    listing: Listing, columns: Columns, data: DataConfig, refuse: Refuse, values: Sequence[str] | None = None
) -> list[Row]:
    """Return the rows; only those with some values of the column that divides them, if there is one."""
    others = [*filter(None, (columns.group, columns.weight, columns.divider))]
    raw = [tuple(row) for row in listing.rows([columns.image, *columns.labels, *others], refuse)]
    if values is not None:
        raw = [row[:-1] for row in raw if row[-1].strip() in values]
    separator = _separator(listing, columns, data, raw)
    # Most rows have the same labels as another row.
    labels_of_cells = functools.cache(functools.partial(_labels_of_cells, columns, data, separator))
    rows = list[Row]()
    for number, text, *cells in raw:
        (weight,), unweighted = _floats([cells.pop()], "shares") if columns.weight else ((1.0,), "")
        group = cells.pop().strip() if columns.group else ""
        image = _clean(text)
        labels, fault = labels_of_cells(*cells)
        if image is None:
            fault = f"path {show(text)} names no file below a folder; write it like cats/1.png"
        if columns.group and not group:
            fault = f"no {columns.group}, by which the images are divided; write the name of its group"
        if unweighted:
            fault = f"{columns.weight} is no weight above 0: {unweighted.rpartition(': ')[0]}; write it like 0.5"
        if image is None or fault:
            refuse(f"{listing.place(number)}: {fault}")
        else:
            rows.append(Row(number, image, labels, group, weight))
    if not rows:
        raise InputError(f"{listing.file}: no rows below the header; give each image a row")
    return rows


def _labels_of_cells(
    columns: Columns, data: DataConfig, separator: str | None, *cells: str
) -> tuple[tuple[Any, ...], str]:
    """Return the labels of a row's cells, and what is wrong with them."""
    if data.targets is not None:
        return _floats(cells, data.targets)
    if columns.form != "one label":
        bits = [_BITS.get(cell.strip().lower()) for cell in cells]
        fault = f"{show(cells[bits.index(None)])} in a column of classes; write 0 or 1" if None in bits else ""
        return tuple(itertools.compress(columns.labels, bits)), fault
    labels = tuple(name.strip() for cell in cells for name in cell.split(separator))
    if "" not in labels and len({*labels}) == len(labels):
        return labels, ""
    is_text = (separator or " ").isprintable()
    fault = f"label {show(cells[0] if is_text else ', '.join(labels))} has an empty name or one name twice"
    several = f", or 'cat{separator or ' '}dog'" if is_text else ", and lists of 0 and 1 as columns"
    return labels, f"{fault}; write one label{several}"


def _floats(cells: Sequence[str], form: str) -> tuple[tuple[float, ...], str]:
    """Return numbers of cells, float32, and what is wrong with them; shares are 0 or more, and not all are 0."""
    values: tuple[float, ...] = (math.nan,)
    with suppress(ValueError):
        values = tuple(map(float, cells))
    if not all(abs(value) < 3e38 for value in values) or (form == "shares" and (min(values) < 0 or not any(values))):
        return values, f"{', '.join(map(show, cells))}: give {FLOATS[form]}"
    return values, ""


def _separator(listing: Listing, columns: Columns, data: DataConfig, rows: Sequence[tuple[Any, ...]]) -> str | None:
    """Return the separator of several labels in a cell; None for blanks. Raises: InputError if there are two."""
    if data.label_separator is not None:
        return data.label_separator.strip() or None
    cells = {row[2] for row in rows} if len(columns.labels) == 1 else ()
    used = [sign for sign in listing.separators if any(sign in cell for cell in cells)]
    if len(used) > 1:
        fault = f"{listing.file}: labels hold both {show(used[0])} and {show(used[1])}"
        raise InputError(fault, advice=("name the separator of labels by ", Key("data.label_separator")))
    return used[0] if used else listing.separators[0]


def _clean(text: str) -> str | None:
    """Return a path without `.` and empty parts; None if it has `..`, control characters or no part."""
    if _PLAIN.fullmatch(text):
        return text
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or not _TEXT.fullmatch(text):
        return None
    return ("/" if text.startswith("/") else "") + "/".join(parts)


# --- Images ---


def _find_images(file: FolderFile, root: Path, images: Sequence[str], data: DataConfig) -> tuple[list[str], str, bool]:
    """Return the folders of the images, relative to the root, that of the first image first; the missing suffix; and
    whether an image is there.

    Raises: InputError if the folder of the config is missing, or the first image is in two places.
    """
    folder = ""
    if data.images is not None:
        given = files.expanded(data.images)
        places = {os.path.realpath(path): path for path in (given.absolute(), root / given) if path.is_dir()}
        if len(places) != 1:
            fault = f": {' and '.join(map(str, places.values())) or 'no such folder'}"
            advice = "" if places else files.nearest_beside(root / given).removeprefix(", ")
            raise InputError(Key("data.images", data.images), fault, advice=advice or "give an absolute path")
        folder = os.fspath(*places.values()).removeprefix(f"{root}/")

    word = next((word for word in ("val", "test") if word in file.name.lower()), "train")

    def is_file(image: str, folder: str, suffix: str) -> bool:
        return os.path.isfile(root / folder / f"{image.removesuffix(suffix)}{suffix}")

    if any(is_file(image, folder, data.suffix or "") for image in images):
        return [folder], data.suffix or "", True
    # Kaggle's train.csv is for train/, and test/ may have images of the same names.
    passed = "(^|[^a-z])test" if word != "test" and word in file.name.lower() else "^$"
    top = [] if folder else _folders(root, passed)
    below = [*top, *itertools.chain(*(_folders(root, passed, name) for name in top))]
    for image, beside in itertools.product(images, (top, below)):
        found = []
        for at in (folder, *beside):
            tried = ("", *_SUFFIXES[: 0 if image.lower().endswith(_SUFFIXES) else None])
            for suffix in tried if data.suffix is None else (data.suffix,):
                both = (kind for kind in (suffix, suffix.upper()) if is_file(image, at, kind))
                found += [(at, kind) for kind in both][:1]
        of_split = [place for place in found if word in place[0].lower()]
        found = of_split if len(of_split) == 1 else found
        if len(found) > 1:
            paths = " and ".join(os.path.join(at, f"{image}{suffix}") for at, suffix in found[:2])
            advice = ("name one by ", Key("data.images"), " or ", Key("data.suffix"))
            raise InputError(f"{file}: {show(image)} is both {paths}", advice=advice)
        if found:
            return [found[0][0], *(each for each in beside if each != found[0][0])], found[0][1], True
    return [folder], data.suffix or "", False


def _folders(root: Path, passed: str, folder: str = "") -> list[str]:
    """Return the folders in a folder, relative to the root, sorted, except those with a pattern `passed` in a name."""
    names = sorted(visible_folders(root / folder))
    return [os.path.join(folder, name) for name in names if not re.search(passed, name.lower())]


def sound_rows(
    table: ExampleTable, place: Callable[[int], str], refuse: Refuse, classes: ClassSelection = None
) -> ExampleTable:
    """Return the rows of some classes whose path is within the root, each image once. The others are rejected.

    Rows of a table with classes may repeat an image if they agree.

    Args:
        place: returns the place of a row of the table in its file, for messages.
        classes: see `Table.select`. Only the folders of these classes are listed.
    """
    repeated = find_repeats(table.id)
    columns = {"other labels": table.labels, "another weight": table.weights, "another group": table.group}
    for row, first in () if table.class_ids else repeated[:1]:
        fault = f"{show(os.fsdecode(table.id[row]))} is also in {place(first)}; write one row for each image"
        refuse(f"{place(row)}: {fault}")
    for (row, first), (other, column) in itertools.product(repeated, columns.items()):
        if column is not None and np.any(column[row] != column[first]):
            fault = f"{show(os.fsdecode(table.id[row]))} has {other} than in {place(first)}"
            refuse(f"{place(row)}: {fault}; write one row for each image")
    if repeated:
        repeat = "repeats" if len(repeated) == 1 else "repeat"
        left_out = f"{counted(len(repeated), 'row')} that {repeat} an image left out"
        table = replace(table, reading=", ".join(filter(None, (table.reading, left_out))))
    chosen = table.without([row for row, _ in repeated]).select(classes)
    root = chosen.store.root if chosen.offset is None else None
    faults = [] if root is None else LocalFiles(root).faults(chosen.path, links_only=True)
    for row, fault in faults:
        at = place(int(np.flatnonzero(table.id == chosen.id[row])[0]))
        refuse(f"{at}: {fault}; put the file itself into the root, or remove the row")
    return chosen.without([row for row, _ in faults])
