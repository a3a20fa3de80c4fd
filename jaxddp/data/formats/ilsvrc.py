"""Reads Kaggle's ILSVRC archive: solution files list the images and their classes.

The archive unpacks the images to:

    ROOT/ILSVRC/Data/CLS-LOC/train/<synset>/<ImageId>.JPEG
    ROOT/ILSVRC/Data/CLS-LOC/{val,test}/<ImageId>.JPEG
"""

import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import nearest, show
from jaxddp.data.faults import Refuse, check_distinct, find_repeats, pass_faults_to, raise_fault
from jaxddp.data.format import Match, Place
from jaxddp.data.formats.csv_listing import check_utf8, csv_rows
from jaxddp.data.labels import ClassSelection
from jaxddp.data.source import Split
from jaxddp.data.storage.root import DataRoot, DatasetEntry, TextFile, find_dataset, is_url, open_root
from jaxddp.data.storage.shards import SHARDS
from jaxddp.data.table import ExampleTable

TRAIN_CSV = "LOC_train_solution.csv"
VAL_CSV = "LOC_val_solution.csv"
TEST_CSV = "LOC_sample_submission.csv"

_IMAGES = "ILSVRC/Data/CLS-LOC"
_VAL_IDS = b"_val_"
"""A part of the ids of validation images. The id of a training image begins with its synset and "_"."""

AnyPath = str | PathLike[str]
SYNSET_MAPPING = "LOC_synset_mapping.txt"
# Ids become names of files and folders. Their length is limited, because one long id would widen the whole column.
_NAME = re.compile(r"(?!\s*\Z)(?!\.{1,2}\Z)[^/\\\x00-\x1f\x7f]{1,200}")
_NAME_RULE = "write a plain name of 1 to 200 characters, without slashes, backslashes or control characters"
_NUMBER = r"-?[0-9]++(?:\.[0-9]++)?+"
# Possessive quantifiers take a third less time, and match the same texts.
_BOXES = re.compile(rf"\s*+(\S++)(?:\s++{_NUMBER}){{4}}(?:\s++\1(?:\s++{_NUMBER}){{4}})*+\s*+")


class Solutions(NamedTuple):
    """The rows of a solution file, in their order."""

    file: TextFile
    image_id: np.ndarray
    """bytes 'S'[N], UTF-8, unique, each a valid name of a file."""
    label: np.ndarray
    """int32[N], indices into the mapping; -1 where the file was read without labels."""
    line: np.ndarray
    """int32[N], the line of the file on which the row ends."""


def train_solutions(
    root: AnyPath,
    csv: AnyPath = TRAIN_CSV,
    classes: ClassSelection = None,
    cache: AnyPath | None = None,
    *,
    refuse: Refuse = raise_fault,
) -> ExampleTable:
    """Read the training examples, whose images are in one folder for each synset.

    The ids of a solution file tell the folder of an image: `ILSVRC2012_val_00000001` is in val/. So this function and
    `val_solutions` each read a solution file of either split; other ids are those of the function's own split.

    Args:
        root: the directory of Kaggle's archive; its URL, `s3://bucket/imagenet`, `gs://…` or `https://…` (docs/data.md
            describes keys and endpoints); or a name in datasets.toml, if there is no directory of that name.
        csv: the solution file: an absolute path, or a path in the root. datasets.toml may replace the default.
        classes: see `Table.select`; None selects the classes that datasets.toml names, or all classes.
        cache: a local folder that keeps the images fetched from a URL; see `CachedStore`.
        refuse: called with a message for each row that cannot be used; by default it raises an error.

    Raises:
        InputError: a file has a fault, or a link leads out of the root. The message names file, line and value.
        Unreachable: the store of a URL does not answer.
    """
    entry = find_dataset(files.check_path(root, "root"))
    csv = entry.train or csv if csv == TRAIN_CSV else csv
    return _read_labelled(entry, csv, classes, cache, "train", refuse)


def val_solutions(
    root: AnyPath,
    csv: AnyPath = VAL_CSV,
    classes: ClassSelection = None,
    cache: AnyPath | None = None,
    *,
    refuse: Refuse = raise_fault,
) -> ExampleTable:
    """Read the validation examples, whose images are in one folder; otherwise see `train_solutions`."""
    entry = find_dataset(files.check_path(root, "root"))
    csv = entry.val or csv if csv == VAL_CSV else csv
    return _read_labelled(entry, csv, classes, cache, "val", refuse)


def test_listing(root: AnyPath, csv: AnyPath = TEST_CSV, cache: AnyPath | None = None) -> ExampleTable:
    """Read the names of the test images from the sample submission: labels are -1, and there are no classes.

    Only the column ImageId is read. Raises: see `train_solutions`.
    """
    data_root = _open_root(find_dataset(files.check_path(root, "root")).path, csv, cache)
    solutions = read_solutions(data_root.file(csv), None)
    folders = np.array(f"{_IMAGES}/test/".encode())
    return _without_links_out(_make_table(data_root, solutions, folders, {}), solutions, raise_fault)


def _read_labelled(
    entry: DatasetEntry, csv: AnyPath, classes: ClassSelection, cache: AnyPath | None, split: Split, refuse: Refuse
) -> ExampleTable:
    data_root = _open_root(entry.path, csv, cache)
    mapping = read_mapping(data_root.file(SYNSET_MAPPING), refuse)
    solutions = read_solutions(data_root.file(csv), tuple(mapping), refuse)
    folders = _folders(solutions, tuple(mapping), split)
    classes = entry.classes if classes is None else classes
    return _without_links_out(_make_table(data_root, solutions, folders, mapping).select(classes), solutions, refuse)


def _folders(solutions: Solutions, synsets: tuple[str, ...], split: Split) -> np.ndarray:
    """Return the folder of each image, bytes 'S'[N], by its id; the folder of `split` for other ids."""
    synset = np.array([synset.encode() for synset in synsets])[solutions.label]
    in_train = np.strings.startswith(solutions.image_id, np.strings.add(synset, b"_"))
    in_val = np.strings.find(solutions.image_id, _VAL_IDS) >= 0
    in_train |= ~in_val & (split == "train")
    of_class = np.strings.add(np.strings.add(f"{_IMAGES}/train/".encode(), synset), b"/")
    return np.where(in_train, of_class, f"{_IMAGES}/val/".encode())


def _open_root(root: str, csv: AnyPath, cache: AnyPath | None) -> DataRoot:
    for name, path in (("csv", csv), *([] if cache is None else [("cache", cache)])):
        files.check_path(path, name)
    return open_root(root, SYNSET_MAPPING, cache)


def _make_table(
    data_root: DataRoot, solutions: Solutions, folders: np.ndarray, mapping: dict[str, str]
) -> ExampleTable:
    path = np.strings.add(folders, np.strings.add(solutions.image_id, b".JPEG"))
    ids, names = tuple(mapping), tuple(mapping.values())
    return ExampleTable(data_root.store, solutions.image_id, path, solutions.label, ids, names)


def _without_links_out(table: ExampleTable, solutions: Solutions, refuse: Refuse) -> ExampleTable:
    """Return the examples whose files are within the root after symbolic links are followed."""

    def where(row: int) -> str:
        line = solutions.line[solutions.image_id == table.id[row]][0]
        return f"{solutions.file}:{line}: ImageId {show(table.id[row].decode())}"

    return table.without_links_out(where, refuse)


class SolutionFiles:
    """The format of Kaggle's archive: a URL, a directory with a solution file, or a config with such a file."""

    description = f"a directory or a URL with {TRAIN_CSV} (Kaggle's ILSVRC archive)"

    def match(self, place: Place) -> Match:
        if is_url(place.address):
            return Match.WHOLE
        if place.local is None:
            return Match.NONE
        # Other formats have splits and shards, which are not files of this name.
        named = [name for name in (place.data.train, place.data.val) if name and not name.endswith(SHARDS)]
        is_named = any(name.endswith(".csv") or (place.local / name).is_file() for name in named)
        if is_named or (place.local / TRAIN_CSV).is_file():
            return Match.NAMED
        if any(place.local.glob("LOC_*_solution.csv")):
            return Match.WHOLE
        nearby = (place.local.glob(pattern) for pattern in ("LOC_*", "*/LOC_*", "../LOC_*"))
        return Match.PARTLY if any(map(any, nearby)) else Match.NONE

    def divided(self, place: Place) -> bool:
        return True

    def open(self, place: Place, split: Split) -> ExampleTable:
        data, read, csv = place.data, train_solutions, place.data.train or TRAIN_CSV
        if split == "val":
            read, train, csv = val_solutions, csv, data.val or VAL_CSV
            if csv == train:
                raise InputError(Key("data.val", csv), ": is also the training split", advice="name another file")
        return read(place.address, csv, data.classes, data.local_cache, refuse=place.refuse)


FORMATS.add("solution files")(SolutionFiles())


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
    left = np.delete(np.arange(len(solutions.line)), [row for row, _ in repeated])
    return Solutions(solutions.file, *(column[left] for column in solutions[1:]))
