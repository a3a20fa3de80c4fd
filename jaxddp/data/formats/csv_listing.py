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
from jaxddp.data.format import Match, Place
from jaxddp.data.formats.splits import SPLITS
from jaxddp.data.source import Split
from jaxddp.data.storage.root import FolderFile, open_root
from jaxddp.data.table import ExampleTable

_SUFFIXES = (".csv", ".tsv")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ROWS_BETWEEN_REPORTS = 10_000
_DELIMITERS = ",;\t"
_NO_TABLES = ("test", "sample_submission")
"""The beginnings of the names of CSV files without labels."""


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
    data = data or DataConfig()
    val = _validation_file(file, data)
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


def lists_images(file: Path) -> bool:
    """Return whether a file is a CSV file that is no solution file of ILSVRC."""
    with suppress(InputError):
        header = is_csv(file) and file.is_file() and _open(file, DataConfig()).header
        return bool(header) and listing.find_column(header, ["ImageId"]) is None
    return False


def _validation_file(file: Path, data: DataConfig) -> str | None:
    """Return the name of the validation file beside a training file; None if there is none."""
    return data.val or (_find(file.parent, "val") if file.stem.lower() == "train" else None)


def _training_file(path: Path, data: DataConfig) -> Path:
    if path.is_file():
        return path
    return path / (data.train or _find(path, "train") or _only_table(path) or "train.csv")


def _find(folder: Path, split: Split) -> str | None:
    """Return the name of a split's file in a folder, in any case; None if there is none."""
    with suppress(OSError):
        names = {name.lower(): name for name in os.listdir(folder)}
        for name in (f"{stem}{suffix}" for stem in SPLITS[split] for suffix in _SUFFIXES):
            # The file test.csv of a competition has no labels.
            if name in names and (name[:4] != "test" or has_labels(folder / names[name])):
                return names[name]
    return None


def _only_table(folder: Path) -> str | None:
    """Return the name of the only CSV file in a folder without folders of classes; None if there is none."""
    with suppress(OSError):
        beside = sorted(os.scandir(folder), key=lambda entry: entry.name)
        named = [entry for entry in beside if is_csv(Path(entry.name)) and not entry.name.startswith(_NO_TABLES)]
        if any(Path(entry.name).stem.lower() in SPLITS["val"] for entry in named):
            return None
        tables = named if len(named) == 1 else [entry for entry in named if has_labels(Path(entry.path))]
        folders = [entry for entry in beside if entry.is_dir() and not entry.name.startswith(".")]
        flat = (entry for entry in folders if not any(below.is_dir() for below in os.scandir(entry)))
        if len(tables) == 1 and (len(folders) < 2 or any(entry.name.startswith(("train", "test")) for entry in flat)):
            return tables[0].name
    return None


class CsvListings:
    """The format of CSV files, and of folders with train.csv or with a single CSV file."""

    description = "a CSV file that lists images and labels, or a directory with train.csv"
    keys = TABLE_KEYS

    def match(self, place: Place) -> Match:
        """Return whether the path is a CSV file, or a folder with train.csv or val.csv, whatever their content is."""
        path, data = place.local, place.data
        if path is None or path.is_file():
            return Match.NAMED if path is not None and is_csv(path) else Match.NONE
        if any(name is not None and lists_images(path / name) for name in (data.train, data.val)):
            return Match.NAMED
        if any(_find(path, split) for split in SPLITS):
            return Match.WHOLE
        return Match.LIKELY if _only_table(path) else Match.NONE

    def divided(self, place: Place) -> bool:
        assert place.local is not None
        file, data = _training_file(place.local, place.data), place.data
        val = _validation_file(file, data)
        if val is None:
            return listing.divides(_open(file, data), data)
        listing.check_one_division(data, file.name, val)
        return True

    def open(self, place: Place, split: Split) -> ExampleTable:
        assert place.local is not None
        file = _training_file(place.local, place.data)
        return read_csv(file, split, place.refuse, place.data).select(place.data.classes)


FORMATS.add("csv_listing")(CsvListings())
