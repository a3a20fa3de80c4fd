"""A CSV file that lists images and their classes.

    FILE.csv                        path,label
                                    cats/1.png,cat
                                    both.jpg,cat;dog

Paths are relative to the file's folder; columns of other names are ignored. Several labels in a cell are separated by
semicolons. Classes are the labels of the training file, sorted. A folder holds train.csv, and val.csv or not; one file
alone has no validation split, which `data.val_share` makes.
"""

import csv
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import jaxddp.files as files
from jaxddp.data.format import Match, Place
from jaxddp.data.formats.csv_text import csv_rows
from jaxddp.data.formats.folders import has_validation_folder
from jaxddp.data.label_sets import LabelSets, as_members
from jaxddp.data.source import Split
from jaxddp.data.storage.home import Home, TextFile, open_root
from jaxddp.data.storage.local import links_out
from jaxddp.data.table import ExampleTable
from jaxddp.errors import InputError
from jaxddp.registry import FORMATS
from jaxddp.wording import nearest, show

SEPARATOR = ";"
"""Between the labels of a cell."""
_COLUMNS = ("path", "label")
_FILES: dict[Split, str] = {"train": "train.csv", "val": "val.csv"}
# Relative, below the folder, and written in one way only, so that a path is found again in a listing of its folder.
_PATH = re.compile(r"(?!.*(?:^|/)\.{0,2}(?:/|\Z))[^\x00-\x1f\x7f]{1,1000}")


def read_csv(file: Path, split: Split = "train") -> ExampleTable:
    """Reads the images of a file, or as "val" those of val.csv beside it. No image is opened.

    Ids are the paths as they are written. Where a row has several labels, the table has `label_sets`.

    Raises:
        InputError: names file and line of a row without a path or a label, a path that is listed twice or leads out of
            the folder, a label of val.csv that the training file does not have.
    """
    home = open_root(file.parent, file.name)
    train = _listing(home.file(file.name))
    own = train if split == "train" else _listing(home.file(_FILES[split]))
    names = tuple(sorted({label for cell in train.labels for label in cell}))
    return _table(home, own, names)


def read_paths(file: Path) -> ExampleTable:
    """Reads the column `path` alone: images whose labels are -1, and no classes. Raises: as `read_csv`."""
    home = open_root(file.parent, file.name)
    listed = home.file(file.name)
    rows = [(_encoded(path, f"{listed}:{line}"), line) for line, path in csv_rows(listed, _COLUMNS[:1])]
    if not rows:
        raise InputError(f"{listed}: no rows below the header; give each image a row")
    _refuse_repeated(listed, rows, "remove one of the two")
    paths = np.array([path for path, _ in rows])
    return ExampleTable(home.store, paths, paths, np.full(len(paths), -1, np.int32), (), (), ())


class _Listing:
    """The rows of a file as columns: `file`, `paths` bytes 'S'[N], `labels` of each row, `line` int64[N]."""

    def __init__(self, file: TextFile):
        rows = [(path, _labels(cell, f"{file}:{line}"), line) for line, path, cell in csv_rows(file, _COLUMNS)]
        if not rows:
            raise InputError(f"{file}: no rows below the header; give each image a row")
        paths, self.labels, lines = zip(*rows, strict=True)
        self.file, self.line = file, np.array(lines, np.int64)
        self.paths = np.array([_encoded(path, f"{file}:{line}") for path, line in zip(paths, lines, strict=True)])


def _listing(file: TextFile) -> _Listing:
    listing = _Listing(file)
    rows = zip(listing.paths.tolist(), listing.line.tolist(), strict=True)
    _refuse_repeated(file, rows, f"write its labels into one row, separated by {SEPARATOR!r}")
    return listing


def _refuse_repeated(file: TextFile, rows: Iterable[tuple[bytes, int]], advice: str) -> None:
    """Raises `InputError` where a path is on two lines."""
    first: dict[bytes, int] = {}
    for path, line in rows:
        if first.setdefault(path, line) != line:
            shown = show(path.decode())
            raise InputError(f"{file}:{line}: {shown} is listed on line {first[path]} already; {advice}")


def _labels(cell: str, where: str) -> list[str]:
    names = [name.strip() for name in cell.split(SEPARATOR)]
    if "" in names:
        raise InputError(f"{where}: label {show(cell)} has an empty name; write one label, or 'cat{SEPARATOR}dog'")
    if len({*names}) < len(names):
        raise InputError(f"{where}: label {show(cell)} names a class twice; name it once")
    return names


def _encoded(path: str, where: str) -> bytes:
    if not _PATH.fullmatch(path):
        raise InputError(f"{where}: path {show(path)} is not below the file's folder; write it like cats/1.png")
    return path.encode()


def _table(home: Home, listing: _Listing, names: tuple[str, ...]) -> ExampleTable:
    index = {name: place for place, name in enumerate(names)}
    for row, cell in enumerate(listing.labels):
        if unknown := [label for label in cell if label not in index]:
            raise InputError(
                f"{listing.file}:{listing.line[row]}: no row of {_FILES['train']} has the label {show(unknown[0])}"
                f"{nearest(unknown[0], index)}; correct it, or take the row out"
            )
    if home.folder and (faults := links_out(home.folder, listing.paths)):
        row, fault = faults[0]
        raise InputError(f"{listing.file}:{listing.line[row]}: {fault}; put the file itself into the folder")
    members = as_members([[index[label] for label in cell] for cell in listing.labels])
    sets = LabelSets(members, str(listing.file), listing.line)
    indices = tuple(range(len(names)))
    table = ExampleTable(home.store, listing.paths, listing.paths, sets.labels, names, names, indices)
    return table.with_label_sets(sets)


class CsvListings:
    """CSV files as a format. A folder is certain to be one where the header of its train.csv has the columns."""

    description = "a CSV file with the columns path,label, or a directory with such a train.csv"

    def match(self, place: Place) -> Match:
        if place.local is None:
            return Match.NONE
        if place.local.is_file():
            return Match.NAMED if place.local.suffix == ".csv" else Match.NONE
        file = place.local / _FILES["train"]
        if not file.is_file():
            return Match.NONE
        if not _has_columns(file):
            return Match.NONE
        # Folders of both splits are a data set by themselves, whatever lists their images.
        in_folders = (place.local / "train").is_dir() and has_validation_folder(place.local)
        return Match.PARTLY if in_folders else Match.WHOLE

    def divided(self, place: Place) -> bool:
        file = _training_file(place)
        return file.name == _FILES["train"] and file.with_name(_FILES["val"]).is_file()

    def open(self, place: Place, split: Split) -> ExampleTable:
        return read_csv(_training_file(place), split).select(place.data.classes)


def _training_file(place: Place) -> Path:
    assert place.local is not None
    return place.local if place.local.is_file() else place.local / _FILES["train"]


def _has_columns(file: Path) -> bool:
    # What is wrong with the file is said by its reader.
    try:
        text = TextFile(str(file), lambda: files.open_regular(file), lambda: "").text(newline="")
        with text:
            header = next(csv.reader(text), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False
    return {*_COLUMNS} <= {name.strip() for name in header}


FORMATS.add("csv listing")(CsvListings())
