"""Reads a CSV file that lists images and their classes.

    FILE.csv                        path,label
                                    cats/1.png,cat
                                    both.jpg,cat;dog

The file is UTF-8 or UTF-16; commas, semicolons or tabs separate the columns. See `jaxddp.data.formats.listing` for the
columns and the images. A folder holds train.csv and perhaps val.csv. One file alone has no validation split unless a
column names the split of each row, but `data.val_share` makes one.
"""

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jaxddp.data.formats.listing as listing
from jaxddp.config import DataConfig
from jaxddp.config.data_section import TABLE_KEYS
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, show
from jaxddp.core.phases import reached
from jaxddp.data.faults import Refuse, index_of_column, raise_fault
from jaxddp.data.format import Match, Place, check_fixed_splits
from jaxddp.data.formats.splits import SPLITS
from jaxddp.data.source import Split
from jaxddp.data.storage.root import FolderFile, open_root
from jaxddp.data.table import ExampleTable

_SUFFIXES = (".csv", ".tsv")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ROWS_BETWEEN_REPORTS = 10_000
_DELIMITERS = ",;\t"


class CsvFile(listing.Listing):
    """A CSV file, whose first line is its header.

    Args:
        columns: the names that each wanted column may have. Of commas, semicolons and tabs, that one separates the
            fields with which the header has the most of these columns, or else the most frequent one.

    Raises: InputError if the file is missing, or its header cannot be read.
    """

    def __init__(self, file: FolderFile, columns: Sequence[Sequence[str]]):
        self.file, self._text = file, file.text()
        first = io.StringIO(self._text, newline="").readline()

        def found(delimiter: str) -> tuple[int, int]:
            with suppress(csv.Error):
                header = [name.strip() for name in next(csv.reader([first], delimiter=delimiter, strict=True), ())]
                return sum(listing.find_column(header, names) is not None for names in columns), first.count(delimiter)
            return 0, 0

        self.delimiter = max(_DELIMITERS, key=found)
        try:
            self.header = [name.strip() for name in next(self._reader(), ())]
        except csv.Error as error:
            raise InputError(f"{file}:1: {error}; correct the quotes of this row") from None
        check_utf8(self.header, file, 1)

    def _reader(self) -> Any:
        return csv.reader(io.StringIO(self._text, newline=""), delimiter=self.delimiter, strict=True)

    def rows(self, columns: Sequence[str], refuse: Refuse = raise_fault) -> Iterator[list[Any]]:
        """Yield [line number, *fields of the columns] for every row that is neither blank nor rejected."""
        reader, file, places = self._reader(), self.file, [self.header.index(name) for name in columns]
        try:
            for number, row in enumerate(reader):
                if number % _ROWS_BETWEEN_REPORTS == 0:
                    reached(number)
                try:
                    check_utf8(row, file, reader.line_num)
                    if len(row) != len(self.header) and row:
                        fault = f"{len(row)} of {len(self.header)} fields in {show(self.delimiter.join(row))}"
                        advice = f"write {self.delimiter.join(self.header)}"
                        raise InputError(f"{file}:{reader.line_num}: {fault}; {advice}")
                    if row and number:
                        yield [reader.line_num, *[row[place] for place in places]]
                except InputError as error:
                    refuse(str(error))
        except csv.Error as error:
            refuse(f"{file}:{reader.line_num}: {error}; correct the quotes of this row")

    def place(self, number: int) -> str:
        return f"{self.file}:{number}"


def csv_rows(file: FolderFile, names: Sequence[str], refuse: Refuse = raise_fault) -> Iterator[list[Any]]:
    """Yield the rows of columns with these names; see `CsvFile`. Raises: InputError if one is missing."""
    table = CsvFile(file, [[name] for name in names])
    columns = [listing.find_column(table.header, [name]) for name in names]
    if None in columns:
        found = show(table.delimiter.join(table.header))
        fault = f"no column {names[columns.index(None)]}, found {found}; give the columns {','.join(names)}"
        raise InputError(f"{file}:1: {fault}")
    for column in filter(None, columns):
        index_of_column(table.header, column, f"{file}:1")
    return table.rows([*filter(None, columns)], refuse)


def check_utf8(texts: Iterable[str], file: FolderFile, line: int) -> None:
    """Check that a line is UTF-8. `FolderFile.text` has decoded other bytes to lone surrogates. Raises: InputError."""
    if any(map(_SURROGATE.search, texts)):
        raise InputError(f"{file}:{line}: not UTF-8; save the file as UTF-8")


def read_csv(
    file: Path, split: Split = "train", refuse: Refuse = raise_fault, data: DataConfig | None = None
) -> ExampleTable:
    """Read the list of images in a CSV file or, for "val", in the validation file beside it; see `read_listing`.

    Raises: InputError if the file or a column is missing, or no row can be used.
    """
    data, val = data or DataConfig(), _validation_file(file)
    of_val = _open(file.parent / val, data) if val is not None and split == "val" else None
    return listing.read_listing(_open(file, data), split, data, refuse, of_val, by_column=val is None)


def read_paths(file: Path, data: DataConfig | None = None) -> ExampleTable:
    """Read only the paths. The images have no classes, and their labels are -1.

    Raises: InputError if there is a row that `read_csv` rejects.
    """
    data = data or DataConfig()
    return listing.read_images(_open(file, data), data)


def _open(file: Path, data: DataConfig) -> CsvFile:
    usual = {"image": listing.IMAGES, "label": listing.LABELS}
    wanted = [(*data.named_columns.get(role, ()), *names) for role, names in usual.items()]
    return CsvFile(open_root(file.parent, file.name).file(file.name), wanted)


def is_csv(path: Path) -> bool:
    """Return whether the name of a file is that of a CSV file."""
    return path.suffix.lower() in _SUFFIXES


def has_labels(file: Path, data: DataConfig | None = None) -> bool:
    """Return whether a CSV file has a column of labels; not if it cannot be read."""
    # A fault is not reported here; `read_csv` reports it.
    with suppress(InputError):
        return listing.has_labels(_open(file, data or DataConfig()), data or DataConfig())
    return False


def _validation_file(file: Path) -> str | None:
    """Return the name of the validation file beside a training file; None if there is none."""
    return _find(file.parent, "val") if file.stem.lower() == "train" else None


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


class CsvListings:
    """The format of CSV files, and of folders with train.csv."""

    description = "a CSV file that lists images and labels, or a directory with train.csv"
    keys = TABLE_KEYS

    def match(self, place: Place) -> Match:
        """Return whether the path is a CSV file, or a folder with train.csv or val.csv, whatever their content is."""
        if place.local is None or (place.local.is_file() and not is_csv(place.local)):
            return Match.NONE
        if place.local.is_file():
            return Match.NAMED
        return Match.WHOLE if any(_find(place.local, split) for split in SPLITS) else Match.NONE

    def divided(self, place: Place) -> bool:
        check_fixed_splits(place)
        assert place.local is not None
        file, data = _training_file(place.local), place.data
        val = _validation_file(file)
        if val is None:
            return listing.divides(_open(file, data), data)
        listing.check_one_division(data, file.name, val)
        return True

    def open(self, place: Place, split: Split) -> ExampleTable:
        assert place.local is not None
        return read_csv(_training_file(place.local), split, place.refuse, place.data).select(place.data.classes)


FORMATS.add("csv_listing")(CsvListings())
