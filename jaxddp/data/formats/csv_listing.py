"""Reads a CSV file that lists images and their classes.

    FILE.csv                        path,label
                                    cats/1.png,cat
                                    both.jpg,cat;dog

The file is UTF-8 or UTF-16; commas, semicolons, tabs or bars separate the columns. See `jaxddp.data.formats.listing`
for the columns and the images. FILE.jsonl has an object a line, whose fields are the columns. Rows of a path and a
label need no header; in FILE.txt, a blank or a tab is between both. A folder holds train.csv and perhaps val.csv, or a
table in each folder of a split. One file alone has no validation split unless a column names the split of each row,
but `data.val_share` makes one.
"""

import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
import jaxddp.data.formats.listing as listing
from jaxddp.config import DataConfig
from jaxddp.config.data_section import TABLE_KEYS
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, show
from jaxddp.core.phases import reached
from jaxddp.data.faults import Refuse, check_columns, raise_fault
from jaxddp.data.format import Match, Place
from jaxddp.data.formats.folders import is_image_name, visible_folders
from jaxddp.data.formats.splits import SPLITS, find_split
from jaxddp.data.source import Split
from jaxddp.data.storage.root import HEAD, FolderFile, open_root
from jaxddp.data.table import ExampleTable

_SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ROWS_BETWEEN_REPORTS = 10_000
_DELIMITERS = ",;\t|"
_DATA = DataConfig()
_PAIR = ("path", "label")
_NO_TABLES = ("test", "sample")
"""The beginnings of the names of CSV files without labels."""


class CsvFile(listing.Listing):
    """A CSV file, whose first line is its header unless it is a path and a label.

    Args:
        columns: the names that each wanted column may have. Of the delimiters, that one separates the fields with which
            the header has the most of these columns, or else the most frequent one.
        limit: the number of bytes that are read; None for all.

    Raises: InputError if the file is missing, or its header cannot be read.
    """

    def __init__(self, file: FolderFile, columns: Sequence[Sequence[str]], limit: int | None = None):
        self.file, self.classes, self._text, self.first = file, {}, file.text(limit), 1
        self._is_json = file.name.lower().endswith(".jsonl")
        if self._is_json:
            self._text = _of_json_lines(self._text, file, limit)
        first = io.StringIO(self._text, newline="").readline()

        def found(delimiter: str) -> tuple[int, int]:
            with suppress(csv.Error):
                header = [name.strip() for name in next(csv.reader([first], delimiter=delimiter, strict=True), ())]
                return sum(listing.find_column(header, names) is not None for names in columns), first.count(delimiter)
            return 0, 0

        self.delimiter = max(f"{_DELIMITERS} " if file.name.lower().endswith(".txt") else _DELIMITERS, key=found)
        try:
            self.header = [name.strip() for name in next(self._reader(), ())]
            if len(self.header) == len(_PAIR) and is_image_name(self.header[0]):
                self.header, self.first = [*_PAIR], 0
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
                # In place of the header, a file of JSON has its first row.
                line = number if self._is_json else reader.line_num
                try:
                    check_utf8(row, file, line)
                    if len(row) != len(self.header) and row:
                        fault = f"{len(row)} of {len(self.header)} fields in {show(self.delimiter.join(row))}"
                        raise InputError(f"{file}:{line}: {fault}; write {self.delimiter.join(self.header)}")
                    if row and number >= self.first:
                        yield [line, *[row[place] for place in places]]
                except InputError as error:
                    refuse(str(error))
        except csv.Error as error:
            refuse(f"{file}:{reader.line_num}: {error}; correct the quotes of this row")

    @property
    def top(self) -> str:
        return f"{self.file}:1"


def _of_json_lines(text: str, file: FolderFile, limit: int | None) -> str:
    """Return JSON lines as CSV; its columns are the fields of the first line. Raises: InputError."""
    out, header = io.StringIO(), list[str]()
    writer = csv.writer(out, lineterminator="\n")
    # In JSON, U+2028 and its like end no line. With a limit, the last line may be cut.
    lines = text.split("\n")
    for number, line in enumerate((limit and lines[:-1]) or lines, 1):
        try:
            fields = files.parse_json(line, dict) if line.strip() else {}
        except ValueError as error:
            raise InputError(f"{file}:{number}: {error}; write a JSON object on each line") from None
        if not header:
            writer.writerow(header := [*fields])
        cells = ((";".join(map(str, cell)) if isinstance(cell, list) else cell) for cell in map(fields.get, header))
        writer.writerow(cells if fields else ())
    return out.getvalue()


def csv_rows(file: FolderFile, names: Sequence[str], refuse: Refuse = raise_fault) -> Iterator[list[Any]]:
    """Yield the rows of columns with these names; see `CsvFile`. Raises: InputError if one is missing."""
    table = CsvFile(file, [[name] for name in names])
    columns = [listing.find_column(table.header, [name]) for name in names]
    if None in columns:
        found = show(table.delimiter.join(table.header))
        fault = f"no column {names[columns.index(None)]}, found {found}; give the columns {','.join(names)}"
        raise InputError(f"{file}:1: {fault}")
    found = [*filter(None, columns)]
    check_columns(table.header, found, f"{file}:1")
    return table.rows(found, refuse)


def check_utf8(texts: Iterable[str], file: FolderFile, line: int) -> None:
    """Check that a line is UTF-8. `FolderFile.text` has decoded other bytes to lone surrogates. Raises: InputError."""
    if any(map(_SURROGATE.search, texts)):
        raise InputError(f"{file}:{line}: not UTF-8; save the file as UTF-8")


def read_paths(file: Path, data: DataConfig) -> ExampleTable:
    """Read only the paths, which alone need no header. The images have no classes, and their labels are -1.

    Raises: InputError if there is a row that `read_listing` rejects.
    """
    table = _open(file, data)
    if len(table.header) == 1 and is_image_name(table.header[0]):
        table.header, table.first = [_PAIR[0]], 0
    return listing.read_images(table, data)


def _open(file: Path, data: DataConfig, limit: int | None = None) -> CsvFile:
    usual = {"image": listing.IMAGES, "label": listing.LABELS}
    wanted = [(*data.named_columns.get(role, ()), *names) for role, names in usual.items()]
    return CsvFile(FolderFile(open_root(file.parent, file.name), file.name), wanted, limit)


def is_csv(path: Path) -> bool:
    """Return whether the name of a file is that of a CSV file."""
    return path.suffix.lower() in _SUFFIXES


def _judge(file: Path, judge: Callable[[CsvFile, DataConfig], Any], data: DataConfig = _DATA) -> bool:
    """Return whether the head of a CSV file passes a test; not if it cannot be read."""
    # A fault is not reported here; `CsvListings.open` reports it.
    with suppress(InputError):
        return bool(judge(_open(file, data, HEAD), data))
    return False


def has_labels(file: Path, data: DataConfig = _DATA) -> bool:
    """Return whether a CSV file has a column of labels; not if it cannot be read."""
    return _judge(file, listing.has_labels, data)


def lists_images(file: Path) -> bool:
    """Return whether a file is a CSV file that is no solution file of ILSVRC."""

    def is_listing(table: CsvFile, data: DataConfig) -> bool:
        return bool(table.header) and listing.find_column(table.header, ["ImageId"]) is None

    return is_csv(file) and file.is_file() and _judge(file, is_listing)


def _files(path: Path, data: DataConfig) -> tuple[Path, Path | None]:
    """Return the training file of a folder or file, and the validation file; None if there is none."""
    folder = path.parent if path.is_file() else path
    if path.is_file() or data.train:
        train = path if path.is_file() else path / str(data.train)
        is_half = train.stem.lower() in ("train", "train_list")
    else:
        half = _find(path, "train")
        train = path / (half or _only_table(path, data) or "train.csv")
        # Without train.csv, its error names that file.
        is_half = half is not None or not train.exists()
    val = data.val or (_find(folder, "val") if is_half else None)
    return train, None if val is None else folder / val


def _find(folder: Path, split: Split) -> str | None:
    """Return the name of a split's file in a folder, or in its folder of the split; None if there is none."""
    with suppress(OSError, InputError):
        names = {name.lower(): name for name in os.listdir(folder)}
        usual = (f"{stem}{suffix}" for stem in SPLITS[split] for suffix in (*_SUFFIXES, "_list.txt"))
        for name in [names[name] for name in usual if name in names]:
            # The file test.csv of a competition has no labels, and train.txt may list anything.
            if not (name.lower().startswith("test") or name.endswith(".txt")) or has_labels(folder / name):
                return name
        if below := find_split(split, visible_folders(folder), folder):
            table = _only_table(folder / below, _DATA)
            return table and f"{below}/{table}"
    return None


def _only_table(folder: Path, data: DataConfig) -> str | None:
    """Return the name of the only table of images in a folder without folders of classes; None if there is none."""
    with suppress(OSError):
        beside = sorted(os.scandir(folder), key=lambda entry: entry.name)
        named = [each for each in beside if is_csv(Path(each.name)) and not each.name.lower().startswith(_NO_TABLES)]
        if not named or any(Path(entry.name).stem.lower() in SPLITS["val"] for entry in named):
            return None
        folders = [entry for entry in beside if entry.is_dir() and not entry.name.startswith((".", "__"))]
        flat = [entry for entry in folders if not any(below.is_dir() for below in os.scandir(entry))]
        if len(folders) > 1 and flat and not any(entry.name.lower().startswith(("train", "test")) for entry in flat):
            return None
        named = [entry for entry in named if _judge(Path(entry.path), listing.finds_images, data)]
        if len(named) > 1:
            by_name = [entry for entry in named if has_labels(Path(entry.path), data)]
            named = by_name or [entry for entry in named if _judge(Path(entry.path), listing.choose_columns, data)]
        return named[0].name if len(named) == 1 else None
    return None


class CsvListings:
    """The format of CSV files and their like, and of folders with train.csv or with a single table."""

    description = "a CSV file that lists images and labels, or a directory with train.csv"
    keys = TABLE_KEYS

    def match(self, place: Place) -> Match:
        """Return whether the path is a CSV file, or a folder with train.csv or val.csv, whatever their content is."""
        path, data = place.local, place.data
        if path is None or path.is_file():
            return Match.NAMED if path is not None and is_csv(path) else Match.NONE
        if any(name is not None and lists_images(path / name) for name in (data.train, data.val)):
            return Match.NAMED
        train, val = (_find(path, split) for split in SPLITS)
        # Beside class folders, val.txt may list the images of val/.
        if train or (val and not val.endswith(".txt")):
            return Match.WHOLE
        return Match.LIKELY if _only_table(path, data) else Match.NONE

    def divided(self, place: Place) -> bool:
        (file, val), data = _files(place.path, place.data), place.data
        if val is None:
            return listing.divides(_open(file, data), data)
        listing.check_one_division(data, file.name, val.name)
        return True

    def open(self, place: Place, split: Split) -> ExampleTable:
        """Read the images in a CSV file or, for "val", in its validation file; or those of a folder.

        Raises: InputError if the file or a column is missing, or no row can be used; see `read_listing`.
        """
        (file, val), data = _files(place.path, place.data), place.data
        of_val = _open(val, data) if val is not None and split == "val" else None
        table = listing.read_listing(_open(file, data), split, data, place.refuse, of_val, by_column=val is None)
        return table.select(data.classes)


FORMATS.add("csv_listing")(CsvListings())
