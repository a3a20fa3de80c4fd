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
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError
from jaxddp.core.phases import reached
from jaxddp.core.wording import nearest, show
from jaxddp.data.faults import Refuse, check_distinct, find_repeats, index_of_column, raise_fault
from jaxddp.data.format import LocalFormat, Match
from jaxddp.data.source import Split
from jaxddp.data.storage.root import DataRoot, TextFile, open_root
from jaxddp.data.table import ExampleTable

SEPARATOR = ";"
"""The separator of several labels in a cell."""
_PATHS = ("path", "file_name", "filename", "file", "image", "image_id", "id")
_LABELS = ("label", "class", "category", "target")
_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "valid", "validation", "test")}
_SUFFIXES = (".csv", ".tsv")
# A relative path below the folder, without empty parts, `.` or `..`, so it equals a path from a directory listing.
_PATH = re.compile(r"(?!.*(?:^|/)\.{0,2}(?:/|\Z))[^\x00-\x1f\x7f]{1,1000}")
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
    train = _read_listing(root.file(file.name), refuse)
    lines = {label: row.line for row in reversed(train.rows) for label in row.labels}
    names = sorted(lines)
    check_distinct(sorted(names, key=lines.__getitem__), lambda name: f"{train.file}:{lines[name]}", refuse)
    listing = train if split == "train" else _read_listing(root.file(_beside(file, split)), refuse)
    return _make_table(root, listing, tuple(names), train.file, refuse)


def read_paths(file: Path) -> ExampleTable:
    """Read only the paths. The images have no classes, and their labels are -1.

    Raises: InputError if there is a row that `read_csv` rejects.
    """
    root = open_root(file.parent, file.name)
    text = root.file(file.name)
    rows = [_Row(line, _encode_path(path, f"{text}:{line}"), []) for line, path in csv_rows(text, [_PATHS])]
    paths = np.array([row.path for row in _refuse_repeated_paths(text, rows, "remove one of the two", raise_fault)])
    return ExampleTable(root.store, paths, paths, np.full(len(paths), -1, np.int32))


class _Row(NamedTuple):
    line: int
    path: bytes
    labels: list[str]


class _Listing(NamedTuple):
    file: TextFile
    rows: list[_Row]


def _read_listing(file: TextFile, refuse: Refuse) -> _Listing:
    rows = []
    for line, path, cell in csv_rows(file, [_PATHS, _LABELS], refuse):
        try:
            rows.append(_Row(line, _encode_path(path, f"{file}:{line}"), _parse_labels(cell, f"{file}:{line}")))
        except InputError as error:
            refuse(str(error))
    return _Listing(
        file, _refuse_repeated_paths(file, rows, f"write its labels into one row, separated by {SEPARATOR!r}", refuse)
    )


def _refuse_repeated_paths(file: TextFile, rows: list[_Row], advice: str, refuse: Refuse) -> list[_Row]:
    """Reject repeated paths; return the first row of each path. Raises: InputError if there are no rows."""
    if not rows:
        raise InputError(f"{file}: no rows below the header; give each image a row")
    repeated = find_repeats(np.array([row.path for row in rows]))
    for place, first in repeated:
        row, first_row = rows[place], rows[first]
        refuse(f"{file}:{row.line}: {show(row.path.decode())} is listed on line {first_row.line} already; {advice}")
    repeated_places = {place for place, _ in repeated}
    return [row for place, row in enumerate(rows) if place not in repeated_places]


def _parse_labels(cell: str, where: str) -> list[str]:
    names = [name.strip() for name in cell.split(SEPARATOR)]
    if "" in names:
        raise InputError(f"{where}: label {show(cell)} has an empty name; write one label, or 'cat{SEPARATOR}dog'")
    if len({*names}) < len(names):
        raise InputError(f"{where}: label {show(cell)} names a class twice; name it once")
    return names


def _encode_path(path: str, where: str) -> bytes:
    if not _PATH.fullmatch(path):
        raise InputError(f"{where}: path {show(path)} is not below the file's folder; write it like cats/1.png")
    return path.encode()


def _make_table(
    root: DataRoot, listing: _Listing, names: tuple[str, ...], train: TextFile, refuse: Refuse
) -> ExampleTable:
    index, rows = {name: place for place, name in enumerate(names)}, []
    for row in listing.rows:
        if unknown := [label for label in row.labels if label not in index]:
            refuse(
                f"{listing.file}:{row.line}: no row of {os.path.basename(train.name)} has the label {show(unknown[0])}"
                f"{nearest(unknown[0], index)}; correct it, or take the row out"
            )
        else:
            rows.append(row)
    paths, lines = np.array([row.path for row in rows], "S"), np.array([row.line for row in rows], np.int64)
    labels = np.array([index[row.labels[0]] for row in rows], np.int32)
    if any(len(row.labels) > 1 for row in rows):
        labels = np.zeros((len(rows), len(names)), np.uint8)
        for row, of_row in zip(rows, labels, strict=True):
            of_row[[index[label] for label in row.labels]] = 1
    table = ExampleTable(root.store, paths, paths, labels, names)
    return table.without_links_out(lambda row: f"{listing.file}:{lines[row]}", refuse)


def is_csv(path: Path) -> bool:
    """Return whether the name of a file is that of a CSV file."""
    return path.suffix.lower() in _SUFFIXES


def holds_csv(path: Path) -> bool | Match:
    """Return whether the path is a CSV file, or a folder with train.csv or val.csv, whatever their content is."""
    if path.is_file():
        return Match.NAMED if is_csv(path) else Match.NONE
    return any(_find(path, split) for split in _NAMES)


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


def _beside(file: Path, split: Split) -> str:
    return _find(file.parent, split) or f"{split}.csv"


def _find(folder: Path, split: Split) -> str | None:
    """Return the name of a split's file in a folder, in any case; None if there is none."""
    with suppress(OSError):
        names = {name.lower(): name for name in os.listdir(folder)}
        for name in (f"{stem}{suffix}" for stem in _NAMES[split] for suffix in _SUFFIXES):
            # The file test.csv of a competition has no labels.
            if name in names and (name[:4] != "test" or has_labels(folder / names[name])):
                return names[name]
    return None


FORMATS.add("csv listing")(
    LocalFormat(
        "a CSV file with the columns path,label, or a directory with train.csv",
        holds_csv,
        lambda path, split, refuse: read_csv(_training_file(path), split, refuse),
        is_divided,
        skips_faults=True,
    )
)


def csv_rows(file: TextFile, columns: Sequence[Sequence[str]], refuse: Refuse = raise_fault) -> Iterator[list]:
    """Yield [line number, *fields of the columns] for every row that is neither blank nor rejected.

    Commas, semicolons or tabs separate the fields: the first of these with which the header has the columns.

    Args:
        columns: the names that each column may have, in any case; the first name that the header has is used.

    Raises: InputError if the file or a column is missing.
    """
    with file.text(newline="") as text:
        first = text.readline()
        delimiter = _delimiter(first, columns)
        reader = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
        try:
            header = [name.strip() for name in next(reader, ())]
            check_utf8(header, file, 1)
            places = _places(file, header, columns, delimiter)
            for number, row in enumerate(reader):
                if number % _ROWS_BETWEEN_REPORTS == 0:
                    reached(number)
                try:
                    check_utf8(row, file, reader.line_num)
                    if len(row) == len(header):
                        yield [reader.line_num, *[row[place] for place in places]]
                    elif row:
                        raise InputError(
                            f"{file}:{reader.line_num}: {len(row)} of {len(header)} fields in "
                            f"{show(delimiter.join(row))}; write {delimiter.join(header)}"
                        )
                except InputError as error:
                    refuse(str(error))
        except csv.Error as error:
            refuse(f"{file}:{reader.line_num}: {error}; correct the quotes of this row")


def _delimiter(header: str, columns: Sequence[Sequence[str]]) -> str:
    """Return the first delimiter with which a header has the columns; if there is none, its most frequent one."""
    for delimiter in _DELIMITERS:
        with suppress(csv.Error):
            found = {_folded(name.strip()) for name in next(csv.reader([header], delimiter=delimiter, strict=True), ())}
            if not any(found.isdisjoint(map(_folded, names)) for names in columns):
                return delimiter
    return max(_DELIMITERS, key=header.count)


def _places(file: TextFile, header: Sequence[str], columns: Sequence[Sequence[str]], delimiter: str) -> list[int]:
    expected = ",".join(names[0] for names in columns)
    if not header:
        raise InputError(f"{file}: no header line; give the columns {expected}")
    folded, places = [*map(_folded, header)], []
    for names in columns:
        place = next((folded.index(name) for name in map(_folded, names) if name in folded), None)
        if place is None:
            also = f" (or {', '.join(names[1:])} for {names[0]})" if names[1:] else ""
            raise InputError(
                f"{file}:1: no column {names[0]}, found {show(delimiter.join(header))}; give the columns "
                f"{expected}{also}"
            )
        index_of_column(header, header[place], f"{file}:1")
        places.append(place)
    return places


def _folded(name: str) -> str:
    return name.casefold().replace("_", "")


def check_utf8(texts: Iterable[str], file: TextFile, line: int) -> None:
    """Check that a line is UTF-8. `TextFile.text` has decoded other bytes to lone surrogates. Raises: InputError."""
    for text in texts:
        if text.isascii():
            continue
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{file}:{line}: not UTF-8; save the file as UTF-8") from None
