"""Reads the text files of Kaggle's ImageNet localization challenge into columns.

    ROOT/LOC_synset_mapping.txt     n01440764 tench, Tinca tinca
    ROOT/LOC_train_solution.csv     ImageId,PredictionString
                                    n01440764_10026,n01440764 13 0 499 374 n01440764 20 7 480 300

A PredictionString holds one or more boxes, each a synset and four coordinates in pixels. The class of an image is the
synset of its boxes. Files are UTF-8, with or without a byte order mark, lines end in LF or CRLF, and fields may be
quoted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted, nearest, show
from jaxddp.data.faults import Refuse, check_distinct, find_repeats, pass_faults_to, raise_fault
from jaxddp.data.formats.csv_text import check_utf8, csv_rows
from jaxddp.data.storage.data_root import TextFile

SYNSET_MAPPING = "LOC_synset_mapping.txt"

# Ids become names of files and folders. Their length is limited, because one long id would widen the whole column.
_NAME = re.compile(r"(?!\s*\Z)(?!\.{1,2}\Z)[^/\\\x00-\x1f\x7f]{1,200}")
_NAME_RULE = "write a plain name of 1 to 200 characters, without slashes, backslashes or control characters"
_NUMBER = r"-?[0-9]++(?:\.[0-9]++)?+"
# Possessive quantifiers take a third less time, and match the same texts.
_BOXES = re.compile(rf"\s*+(\S++)(?:\s++{_NUMBER}){{4}}(?:\s++\1(?:\s++{_NUMBER}){{4}})*+\s*+")


@dataclass(frozen=True, eq=False)
class Solutions:
    """The rows of a solution file, in their order."""

    file: TextFile
    image_id: np.ndarray
    """bytes 'S'[N], UTF-8, unique, each a valid name of a file."""
    label: np.ndarray
    """int32[N], indices into the mapping; -1 where the file was read without labels."""
    line: np.ndarray
    """int32[N], the line of the file on which the row ends."""

    def __repr__(self) -> str:
        return f"Solutions({self.file}, {counted(len(self.label), 'row')})"

    def where(self, image_id: bytes) -> str:
        """Return `FILE:LINE` of an image, for messages."""
        return f"{self.file}:{self._line_of_image[image_id]}"

    def without(self, rows: np.ndarray) -> "Solutions":
        """Return a copy without the rows of some indices, int[n]."""
        if not len(rows):
            return self
        return Solutions(self.file, *(np.delete(column, rows) for column in (self.image_id, self.label, self.line)))

    @cached_property
    def _line_of_image(self) -> dict[bytes, int]:
        """The line of each image; the first line if an image has several lines."""
        return dict(zip(self.image_id[::-1].tolist(), self.line[::-1].tolist(), strict=True))


def read_mapping(file: TextFile, refuse: Refuse = raise_fault) -> dict[str, str]:
    """Read `LOC_synset_mapping.txt`: a dict from synset to readable name, in the order of the labels.

    These are rejected: a line that is not UTF-8; and a synset that is listed twice, looks like another synset, or is
    not a valid name of a folder.

    Raises: InputError if the file is missing or empty.
    """
    names: dict[str, str] = {}
    lines: dict[str, int] = {}
    with file.text() as text:
        for line, content in enumerate(text, 1):
            if not content.strip():
                continue
            with pass_faults_to(refuse):
                check_utf8([content], file, line)
                synset, *name = content.split(maxsplit=1)
                if not _NAME.fullmatch(synset):
                    raise InputError(f"{file}:{line}: synset {show(synset)} cannot name a folder; {_NAME_RULE}")
                if lines.setdefault(synset, line) != line:
                    first = lines[synset]
                    raise InputError(
                        f"{file}:{line}: duplicate synset {synset}, first on line {first}; remove one of the two"
                    )
                names[synset] = name[0].strip() if name else synset
    if not names:
        raise InputError(f"{file}: empty; give one line per class, such as 'n01440764 tench, Tinca tinca'")
    check_distinct(names, lambda synset: f"{file}:{lines[synset]}", refuse)
    return names


def read_solutions(file: TextFile, synsets: Sequence[str] | None, refuse: Refuse = raise_fault) -> Solutions:
    """Read a solution file; if `synsets` is None, only its column ImageId.

    This takes about 2 microseconds a row: 1,281,167 rows in under 3 s. Rows of another format than the module describes
    are rejected.

    Raises:
        InputError: the file or a column is missing, or no row can be used.
    """
    columns = [("ImageId",), ("PredictionString",)][: 1 if synsets is None else 2]
    index = {synset: label for label, synset in enumerate(synsets or ())}
    names: list[bytes] = []
    labels: list[int] = []
    lines: list[int] = []
    for line, image_id, *prediction in csv_rows(file, columns, refuse):
        try:
            if not _NAME.fullmatch(image_id):
                fault = f"ImageId {show(image_id)} cannot name a file" if image_id.strip() else "blank ImageId"
                raise InputError(f"{file}:{line}: {fault}; {_NAME_RULE}")
            labels.append(_parse_label(prediction[0], index, file, line) if prediction else -1)
        except InputError as error:
            refuse(str(error))
            continue
        names.append(image_id.encode())
        lines.append(line)
    if not names:
        raise InputError(f"{file}: no rows below the header; give each image a row")
    solutions = Solutions(file, np.array(names), np.array(labels, np.int32), np.array(lines, np.int32))
    return _refuse_repeated_ids(solutions, refuse)


def _parse_label(prediction: str, index: Mapping[str, int], file: TextFile, line: int) -> int:
    match = _BOXES.fullmatch(prediction)
    if match is None:
        raise InputError(
            f"{file}:{line}: PredictionString {show(prediction)} {_describe_fault(prediction)}; "
            "write 'synset x1 y1 x2 y2' for each box"
        )
    label = index.get(match[1])
    if label is None:
        raise InputError(
            f"{file}:{line}: unknown synset {show(match[1])}; correct it, or add it to {SYNSET_MAPPING}"
            f"{nearest(match[1], index)}"
        )
    return label


def _describe_fault(prediction: str) -> str:
    tokens = prediction.split()
    if not tokens or len(tokens) % 5:
        return f"is incomplete: it has {len(tokens)} words, and each box needs 5"
    if other := next((synset for synset in tokens[::5] if synset != tokens[0]), None):
        return f"has boxes of two synsets, {show(tokens[0])} and {show(other)}"
    numbers = (token for place, token in enumerate(tokens) if place % 5)
    number = next(token for token in numbers if not re.fullmatch(_NUMBER, token))
    return f"has the coordinate {show(number)}, which is not a number"


def _refuse_repeated_ids(solutions: Solutions, refuse: Refuse) -> Solutions:
    repeated = find_repeats(solutions.image_id)
    for row, first in repeated:
        image_id, line = bytes(solutions.image_id[row]), solutions.line
        refuse(
            f"{solutions.file}:{line[row]}: duplicate ImageId {show(image_id.decode())}, first on line {line[first]}; "
            "remove one"
        )
    return solutions.without(np.array([row for row, _ in repeated], np.int64))
