"""Kaggle's files of the ImageNet localization challenge, as columns.

    ROOT/LOC_synset_mapping.txt     n01440764 tench, Tinca tinca
    ROOT/LOC_train_solution.csv     ImageId,PredictionString
                                    n01440764_10026,n01440764 13 0 499 374 n01440764 20 7 480 300

A PredictionString holds one or more boxes, each a synset and four coordinates in pixels. An image is of the synset that
its boxes name. Files are UTF-8, with or without a byte order mark, lines end in LF or CRLF, and fields may be quoted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxddp.data.formats.csv_text import csv_rows, errors_of_text
from jaxddp.data.storage.home import TextFile
from jaxddp.errors import InputError
from jaxddp.wording import counted, nearest, show

SYNSET_MAPPING = "LOC_synset_mapping.txt"

# Ids become names of files and folders. Their length is limited because one long name widens a whole column.
_NAME = re.compile(r"(?!\s*\Z)(?!\.{1,2}\Z)[^/\\\x00-\x1f\x7f]{1,200}")
_NAME_RULE = "write a plain name of 1 to 200 characters, without slashes, backslashes or control characters"
_NUMBER = r"-?[0-9]++(?:\.[0-9]++)?+"
# Possessive, which is a third faster: nothing here can match in two ways.
_BOXES = re.compile(rf"\s*+(\S++)(?:\s++{_NUMBER}){{4}}(?:\s++\1(?:\s++{_NUMBER}){{4}})*+\s*+")


@dataclass(frozen=True, eq=False)
class Solutions:
    """The rows of a solution file, in their order."""

    file: TextFile
    image_id: np.ndarray
    """bytes 'S'[N], UTF-8, unique, each good as the name of a file."""
    label: np.ndarray
    """int32[N], index into the mapping; -1 where the file was read without labels."""

    def __repr__(self) -> str:
        return f"Solutions({self.file}, {counted(len(self.label), 'row')})"

    line: np.ndarray
    """int32[N], the line of the file on which the row ends."""

    def where(self, image_id: bytes) -> str:
        """`FILE:LINE` of an image, for an error message."""
        return f"{self.file}:{self.line[np.flatnonzero(self.image_id == image_id)[0]]}"


def read_mapping(file: TextFile) -> dict[str, str]:
    """Reads `LOC_synset_mapping.txt`: synset -> readable name, in the file's order, which is the order of the labels.

    Raises `InputError`: a missing or empty file, one that is not UTF-8, a synset given twice or not fit for a folder.
    """
    names: dict[str, str] = {}
    lines: dict[str, int] = {}
    with errors_of_text(file), file.text() as text:
        for line, content in enumerate(text, 1):
            if not content.strip():
                continue
            synset, *name = content.split(maxsplit=1)
            if not _NAME.fullmatch(synset):
                raise InputError(f"{file}:{line}: synset {show(synset)} cannot name a folder; {_NAME_RULE}")
            if lines.setdefault(synset, line) != line:
                raise InputError(
                    f"{file}:{line}: duplicate synset {synset}, first on line {lines[synset]}; remove one of the two"
                )
            names[synset] = name[0].strip() if name else synset
    if not names:
        raise InputError(f"{file}: empty; give one line a class, such as 'n01440764 tench, Tinca tinca'")
    return names


def read_solutions(file: TextFile, synsets: Sequence[str] | None) -> Solutions:
    """Reads a solution file, or without synsets a listing of images, of which only ImageId is read.

    It takes about 2 microseconds a row: 1,281,167 rows in under 3 s.

    Raises:
        InputError: naming file and line, for a row or a file that does not have the form above.
    """
    columns = ("ImageId",) if synsets is None else ("ImageId", "PredictionString")
    index = {synset: label for label, synset in enumerate(synsets or ())}
    names: list[bytes] = []
    labels: list[int] = []
    lines: list[int] = []
    for line, image_id, *prediction in csv_rows(file, columns):
        if not _NAME.fullmatch(image_id):
            fault = f"ImageId {show(image_id)} cannot name a file" if image_id.strip() else "blank ImageId"
            raise InputError(f"{file}:{line}: {fault}; {_NAME_RULE}")
        names.append(image_id.encode())
        labels.append(_label(prediction[0], index, file, line) if prediction else -1)
        lines.append(line)
    if not names:
        raise InputError(f"{file}: no rows below the header; give each image a row")
    solutions = Solutions(file, np.array(names), np.array(labels, np.int32), np.array(lines, np.int32))
    _refuse_duplicates(solutions)
    return solutions


def _label(prediction: str, index: Mapping[str, int], file: TextFile, line: int) -> int:
    match = _BOXES.fullmatch(prediction)
    if match is None:
        raise InputError(
            f"{file}:{line}: PredictionString {show(prediction)} {_fault(prediction)}; write 'synset x1 y1 x2 y2' a box"
        )
    label = index.get(match[1])
    if label is None:
        raise InputError(
            f"{file}:{line}: unknown synset {show(match[1])}; correct it, or add it to {SYNSET_MAPPING}"
            f"{nearest(match[1], index)}"
        )
    return label


def _fault(prediction: str) -> str:
    tokens = prediction.split()
    if not tokens or len(tokens) % 5:
        return f"is short: it has {len(tokens)} words, which is not 5 a box"
    if other := next((synset for synset in tokens[::5] if synset != tokens[0]), None):
        return f"has boxes of two synsets, {show(tokens[0])} and {show(other)}"
    numbers = (token for place, token in enumerate(tokens) if place % 5)
    number = next(token for token in numbers if not re.fullmatch(_NUMBER, token))
    return f"has the coordinate {show(number)}, which is not a number"


def _refuse_duplicates(solutions: Solutions) -> None:
    # Sorting the column takes half the time of looking each of a million names up among those before it.
    order = np.argsort(solutions.image_id, kind="stable")
    again = order[1:][solutions.image_id[order[1:]] == solutions.image_id[order[:-1]]]
    if len(again):
        row = int(again.min())
        image_id = bytes(solutions.image_id[row])
        raise InputError(
            f"{solutions.file}:{solutions.line[row]}: duplicate ImageId {show(image_id.decode())}, first on line "
            f"{solutions.where(image_id).rpartition(':')[2]}; remove one"
        )
