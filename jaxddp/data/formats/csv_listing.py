"""Reads a CSV file that lists images and their classes.

    FILE.csv                        path,label
                                    cats/1.png,cat
                                    both.jpg,cat;dog

The file is UTF-8 or UTF-16; commas, semicolons or tabs separate the columns. Other usual names of the columns are
accepted, in any case, and other columns are ignored. Paths are relative to the file's folder. Semicolons separate
several labels in a cell. The classes are the labels of the training file, sorted. A folder holds train.csv and perhaps
val.csv. One file alone has no validation split, but `data.val_share` makes one.
"""

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, nearest, show
from jaxddp.core.phases import reached
from jaxddp.data.faults import Refuse, check_distinct, find_repeats, index_of_column, raise_fault
from jaxddp.data.format import LocalFormat, Match
from jaxddp.data.formats.splits import SPLITS
from jaxddp.data.source import ClassSelection, Split
from jaxddp.data.storage.root import FolderFile, open_root
from jaxddp.data.storage.store import LocalFiles
from jaxddp.data.table import ExampleTable

SEPARATOR = ";"
"""The separator of several labels in a cell."""
_PATHS = ("path", "file_name", "filename", "file", "image", "image_id", "id")
_LABELS = ("label", "class", "category", "target")
_SUFFIXES = (".csv", ".tsv")
# A relative path below the folder, without empty parts, `.` or `..`, so it equals a path from a directory listing.
_PATH = re.compile(r"(?!.*(?:^|/)\.{0,2}(?:/|\Z))[^\x00-\x1f\x7f]{1,1000}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ROWS_BETWEEN_REPORTS = 10_000
_DELIMITERS = ",;\t"


def read_csv(file: Path, split: Split = "train", refuse: Refuse = raise_fault) -> ExampleTable:
    """Read the list of images in a CSV file or, for "val", in the validation file beside it. No image is opened.

    Ids are the paths as written. If a row has several labels, the labels are multi-hot.

    These rows are rejected, with a message that names the file and the line:

    - a row without a path or without a label;
    - a row whose path is listed already, or is outside the folder;
    - a row whose label looks like another label;
    - a row of val.csv with a label that the training file does not have.

    Raises:
        InputError: the file or a column is missing, or no row can be used.
    """
    root = open_root(file.parent, file.name)
    listing = root.file(file.name)
    rows = _read_rows(listing, refuse)
    first = {label: row.line for row in reversed(rows) for label in row.labels}
    names = sorted(first)
    check_distinct(sorted(names, key=first.__getitem__), lambda name: f"{listing}:{first[name]}", refuse)
    if split == "val":
        listing = root.file(_find(file.parent, split) or "val.csv")
        rows = _read_rows(listing, refuse)
    known, index = [], {name: place for place, name in enumerate(names)}
    for row in rows:
        if unknown := [label for label in row.labels if label not in index]:
            label = f"{show(unknown[0])}{nearest(unknown[0], index)}"
            refuse(f"{listing}:{row.line}: no row of {file.name} has the label {label}; correct it")
        else:
            known.append(row)
    paths = np.array([row.path for row in known], "S")
    labels = np.array([index[row.labels[0]] for row in known], np.int32)
    if any(len(row.labels) > 1 for row in known):
        labels = np.zeros((len(known), len(names)), np.uint8)
        for row, of_row in zip(known, labels, strict=True):
            of_row[[index[label] for label in row.labels]] = 1
    table = ExampleTable(root.store, paths, paths, labels, tuple(names))
    return sound_rows(table, listing, [row.line for row in known], refuse)


def read_paths(file: Path) -> ExampleTable:
    """Read only the paths. The images have no classes, and their labels are -1.

    Raises: InputError if there is a row that `read_csv` rejects.
    """
    root = open_root(file.parent, file.name)
    rows = _read_rows(listing := root.file(file.name), raise_fault, [_PATHS])
    paths = np.array([row.path for row in rows])
    table = ExampleTable(root.store, paths, paths, np.full(len(paths), -1, np.int32))
    return sound_rows(table, listing, [row.line for row in rows], raise_fault)


def sound_rows(
    table: ExampleTable, file: FolderFile, lines: Sequence[int], refuse: Refuse, classes: ClassSelection = None
) -> ExampleTable:
    """Return the rows of some classes whose id is new and whose path is within the root. The others are rejected.

    Args:
        lines: the line of each row in the file.
        classes: see `Table.select`. Only the folders of these classes are listed.
    """
    repeated = find_repeats(table.id)
    for row, first in repeated:
        name, line = show(os.fsdecode(table.id[row])), lines[first]
        refuse(f"{file}:{lines[row]}: {name} is listed on line {line} already; write one row for each image")
    chosen = table.without([row for row, _ in repeated]).select(classes)
    faults = LocalFiles(chosen.store.root).faults(chosen.path, links_only=True) if chosen.store.root else []
    for row, fault in faults:
        line = lines[int(np.flatnonzero(table.id == chosen.id[row])[0])]
        refuse(f"{file}:{line}: {fault}; put the file itself into the root, or remove the row")
    return chosen.without([row for row, _ in faults])


class _Row(NamedTuple):
    line: int
    path: bytes
    labels: list[str]


def _read_rows(file: FolderFile, refuse: Refuse, columns: Sequence[Sequence[str]] = (_PATHS, _LABELS)) -> list[_Row]:
    rows = []
    for line, path, *cells in csv_rows(file, columns, refuse):
        labels = [name.strip() for cell in cells for name in cell.split(SEPARATOR)]
        if not _PATH.fullmatch(path):
            refuse(f"{file}:{line}: path {show(path)} is not below the file's folder; write it like cats/1.png")
        elif "" in labels or len({*labels}) < len(labels):
            fault = f"label {show(cells[0])} has an empty name or one name twice"
            refuse(f"{file}:{line}: {fault}; write one label, or 'cat{SEPARATOR}dog'")
        else:
            rows.append(_Row(line, path.encode(), labels))
    if not rows:
        raise InputError(f"{file}: no rows below the header; give each image a row")
    return rows


def is_csv(path: Path) -> bool:
    """Return whether the name of a file is that of a CSV file."""
    return path.suffix.lower() in _SUFFIXES


def holds_csv(path: Path) -> bool | Match:
    """Return whether the path is a CSV file, or a folder with train.csv or val.csv, whatever their content is."""
    if path.is_file():
        return Match.NAMED if is_csv(path) else Match.NONE
    return any(_find(path, split) for split in SPLITS)


def is_divided(path: Path) -> bool:
    """Return whether there is a validation file beside the training file."""
    file = _training_file(path)
    return file.stem.lower() == "train" and _find(file.parent, "val") is not None


def has_labels(file: Path) -> bool:
    """Return whether a CSV file has a column of labels; not if it cannot be read."""
    # A fault is not reported here; `read_csv` reports it.
    with suppress(InputError):
        next(csv_rows(open_root(file.parent, file.name).file(file.name), [_LABELS]), None)
        return True
    return False


def _training_file(path: Path) -> Path:
    return path if path.is_file() else path / (_find(path, "train") or "train.csv")


def _find(folder: Path, split: Split) -> str | None:
    """Return the name of a split's file in a folder, in any case; None if there is none."""
    with suppress(OSError):
        names = {name.lower(): name for name in os.listdir(folder)}
        for name in (f"{stem}{suffix}" for stem in SPLITS[split] for suffix in _SUFFIXES):
            # The file test.csv of a competition has no labels.
            if name in names and (name[:4] != "test" or has_labels(folder / names[name])):
                return names[name]
    return None


def _read(path: Path, split: Split, refuse: Refuse) -> ExampleTable:
    return read_csv(_training_file(path), split, refuse)


_DESCRIPTION = "a CSV file with the columns path,label, or a directory with train.csv"
FORMATS.add("csv_listing")(LocalFormat(_DESCRIPTION, holds_csv, _read, is_divided, skips_faults=True))


def csv_rows(file: FolderFile, columns: Sequence[Sequence[str]], refuse: Refuse = raise_fault) -> Iterator[list]:
    """Yield [line number, *fields of the columns] for every row that is neither blank nor rejected.

    Commas, semicolons or tabs separate the fields: the first of these with which the header has the columns.

    Args:
        columns: the names that each column may have, in any case; the first name that the header has is used.

    Raises: InputError if the file or a column is missing.
    """
    text = io.StringIO(file.text(), newline="")
    delimiter = _delimiter(text.readline(), columns)
    text.seek(0)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(reader, ())]
        check_utf8(header, file, 1)
        places = _places(header, columns)
        if -1 in places:
            name, *others = columns[places.index(-1)]
            expected = ",".join(names[0] for names in columns)
            also = f" (or {', '.join(others)} for {name})" if others else ""
            found = show(delimiter.join(header))
            raise InputError(f"{file}:1: no column {name}, found {found}; give the columns {expected}{also}")
        for place in places:
            index_of_column(header, header[place], f"{file}:1")
        for number, row in enumerate(reader):
            if number % _ROWS_BETWEEN_REPORTS == 0:
                reached(number)
            try:
                check_utf8(row, file, reader.line_num)
                if len(row) == len(header):
                    yield [reader.line_num, *[row[place] for place in places]]
                elif row:
                    fault = f"{len(row)} of {len(header)} fields in {show(delimiter.join(row))}"
                    raise InputError(f"{file}:{reader.line_num}: {fault}; write {delimiter.join(header)}")
            except InputError as error:
                refuse(str(error))
    except csv.Error as error:
        refuse(f"{file}:{reader.line_num}: {error}; correct the quotes of this row")


def _delimiter(header: str, columns: Sequence[Sequence[str]]) -> str:
    """Return the first delimiter with which a header has the columns; if there is none, its most frequent one."""
    for delimiter in _DELIMITERS:
        with suppress(csv.Error):
            names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter, strict=True), ())]
            if -1 not in _places(names, columns):
                return delimiter
    return max(_DELIMITERS, key=header.count)


def _places(header: Sequence[str], columns: Sequence[Sequence[str]]) -> list[int]:
    """Return the place of each column in a header; -1 for a missing column."""
    folded = [*map(_folded, header)]
    known = ([folded.index(key) for key in map(_folded, names) if key in folded] for names in columns)
    return [places[0] if places else -1 for places in known]


def _folded(name: str) -> str:
    return name.casefold().replace("_", "")


def check_utf8(texts: Iterable[str], file: FolderFile, line: int) -> None:
    """Check that a line is UTF-8. `FolderFile.text` has decoded other bytes to lone surrogates. Raises: InputError."""
    if any(map(_SURROGATE.search, texts)):
        raise InputError(f"{file}:{line}: not UTF-8; save the file as UTF-8")
