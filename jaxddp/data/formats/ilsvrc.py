"""Reads Kaggle's ILSVRC archive: solution files list the images and their classes.

The archive unpacks the images to:

    ROOT/ILSVRC/Data/CLS-LOC/train/<synset>/<ImageId>.JPEG
    ROOT/ILSVRC/Data/CLS-LOC/{val,test}/<ImageId>.JPEG      or val/<synset>/<ImageId>.JPEG

`jaxddp.data.formats.devkit` reads the original archive, and `jaxddp.data.formats.folders` class folders without either.
"""

import io
import os
import re
from collections.abc import Collection
from contextlib import suppress
from os import PathLike
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError, Key, nearest, show
from jaxddp.data.faults import Refuse, check_distinct, pass_faults_to, raise_fault
from jaxddp.data.format import Match, Place
from jaxddp.data.formats.csv_listing import check_utf8, csv_rows, lists_images
from jaxddp.data.formats.devkit import find_kit, read_kit
from jaxddp.data.formats.folders import find_layout
from jaxddp.data.formats.listing import sound_rows
from jaxddp.data.source import ClassSelection, Split
from jaxddp.data.storage.root import DatasetEntry, Folder, FolderFile, find_dataset, is_url, open_root, with_cache
from jaxddp.data.storage.shards import SHARDS
from jaxddp.data.storage.store import LocalFiles, Store
from jaxddp.data.table import ExampleTable

TRAIN_CSV = "LOC_train_solution.csv"
VAL_CSV = "LOC_val_solution.csv"
TEST_CSV = "LOC_sample_submission.csv"
_CSV: dict[Split, str] = {"train": TRAIN_CSV, "val": VAL_CSV}

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


def train_solutions(
    root: AnyPath, csv: AnyPath = TRAIN_CSV, classes: ClassSelection = None, cache: AnyPath | None = None
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

    Raises:
        InputError: a file has a fault, or a link leads out of the root. The message names file, line and value.
        Unreachable: the store of a URL does not answer.
    """
    return _read_labelled(root, csv, classes, cache, "train", raise_fault)


def val_solutions(
    root: AnyPath, csv: AnyPath = VAL_CSV, classes: ClassSelection = None, cache: AnyPath | None = None
) -> ExampleTable:
    """Read the validation examples, whose images are in one folder; otherwise see `train_solutions`."""
    return _read_labelled(root, csv, classes, cache, "val", raise_fault)


def test_listing(root: AnyPath, csv: AnyPath = TEST_CSV, cache: AnyPath | None = None) -> ExampleTable:
    """Read the names of the test images from the sample submission: labels are -1, and there are no classes.

    Only the column ImageId is read. Raises: see `train_solutions`.
    """
    _, _, store, file = _open(root, csv, cache)
    image_id, label, lines = _read_rows(file, (), raise_fault)
    path = np.strings.add(f"{_IMAGES}/test/".encode(), np.strings.add(image_id, b".JPEG"))
    return sound_rows(ExampleTable(store, image_id, path, label), lambda row: f"{file}:{lines[row]}", raise_fault)


def _read_labelled(
    place: AnyPath, csv: AnyPath, classes: ClassSelection, cache: AnyPath | None, split: Split, refuse: Refuse
) -> ExampleTable:
    entry, folder, store, file = _open(place, csv, cache, split)
    root = folder.root
    mapping = read_mapping(FolderFile(folder, SYNSET_MAPPING), refuse)
    image_id, label, lines = _read_rows(file, mapping, refuse)
    # Ids tell the folder of an image; the folder of other ids is that of `split`.
    synset = np.array([synset.encode() for synset in mapping])[label]
    in_train = np.strings.startswith(image_id, np.strings.add(synset, b"_"))
    in_train |= (np.strings.find(image_id, _VAL_IDS) < 0) & (split == "train")
    of_class = np.strings.add(np.strings.add(f"{_IMAGES}/train/".encode(), synset), b"/")
    of_val: np.ndarray | bytes = f"{_IMAGES}/val/".encode()
    if root is not None and not in_train.all() and (root / _IMAGES / "val" / synset[~in_train][0].decode()).is_dir():
        of_val = np.strings.replace(of_class, b"/train/", b"/val/", 1)
    folder = np.where(in_train, of_class, of_val)
    path = np.strings.add(folder, np.strings.add(image_id, b".JPEG"))
    table = ExampleTable(store, image_id, path, label, tuple(mapping), tuple(mapping.values()))
    return sound_rows(table, lambda row: f"{file}:{lines[row]}", refuse, entry.classes if classes is None else classes)


def _open(
    root: AnyPath, csv: AnyPath, cache: AnyPath | None, split: Split | None = None
) -> tuple[DatasetEntry, Folder, Store, FolderFile]:
    """Return the entry of a data set in datasets.toml, its folder, the store of its images, which may be a cache of the
    folder, and the solution file of a split, or `csv`. Text files are always fetched again."""
    root, csv = files.check_path(root, "root"), files.check_path(csv, "csv")
    cache = cache and files.check_path(cache, "cache")
    entry = find_dataset(root)
    folder = open_root(entry.path, SYNSET_MAPPING)
    named = getattr(entry, split) if split is not None and csv == _CSV[split] else None
    path = os.fspath(named or csv)
    file = FolderFile(LocalFiles(Path("/")) if os.path.isabs(path) else folder, path)
    return entry, folder, with_cache(folder, folder, cache), file


class ImageNet:
    """The format of Kaggle's archive (a URL, a directory, or a config with a solution file) and the original one."""

    description = f"a directory or a URL with {TRAIN_CSV} (Kaggle's ILSVRC archive)"

    def match(self, place: Place) -> Match:
        if is_url(place.address):
            return Match.WHOLE
        if place.local is None:
            return Match.NONE
        # Other formats have splits and shards, which are not files of this name.
        named = [name for name in (place.data.train, place.data.val) if name and not name.endswith(SHARDS)]
        named = [name for name in named if not place.local.is_file() and not lists_images(place.local / name)]
        if any(name.endswith(".csv") or (place.local / name).is_file() for name in named):
            return Match.NAMED
        root = _archive_of(place.local)
        is_listed = (root / VAL_CSV).is_file() and place.local != root / _IMAGES
        with suppress(InputError):
            # Without a list of the validation images, their class folders are used, if there are any.
            if not is_listed and "val" in find_layout(root / _IMAGES).splits:
                return Match.NONE
            if find_kit(place.local):
                return Match.NAMED
        if (root / TRAIN_CSV).is_file() or root != place.local:
            return Match.NAMED
        if any(root.glob("LOC_*_solution.csv")):
            return Match.WHOLE
        nearby = (place.local.glob(pattern) for pattern in ("LOC_*", "*/LOC_*", "../LOC_*"))
        return Match.PARTLY if any(map(any, nearby)) else Match.NONE

    def divided(self, place: Place) -> bool:
        return True

    def open(self, place: Place, split: Split) -> ExampleTable:
        data, address = place.data, place.address
        if place.local is not None:
            root = _archive_of(place.local)
            if kit := find_kit(root):
                return read_kit(kit, split, place.refuse).select(data.classes)
            address = address if root == place.local else str(root)
        csv = {"train": data.train or TRAIN_CSV, "val": data.val or VAL_CSV}
        if split == "val" and csv["val"] == csv["train"]:
            raise InputError(Key("data.val", csv["val"]), ": is also the training split", advice="name another file")
        return _read_labelled(address, csv[split], data.classes, data.local_cache, split, place.refuse)


def _archive_of(path: Path) -> Path:
    """Return the root of Kaggle's archive for its folder ILSVRC, ILSVRC/Data or ILSVRC/Data/CLS-LOC, else the path."""
    for depth, root in enumerate(path.parents[:3], 1):
        if path.parts[-depth:] == Path(_IMAGES).parts[:depth] and any(root.glob("LOC_*_solution.csv")):
            return root
    return path


FORMATS.add("ilsvrc")(ImageNet())


def read_mapping(file: FolderFile, refuse: Refuse = raise_fault) -> dict[str, str]:
    """Read `LOC_synset_mapping.txt`: a dict from synset to readable name, in the order of the labels.

    These are rejected: a line that is not UTF-8; and a synset that is listed twice, looks like another synset, or is
    not a valid name of a folder.

    Raises: InputError if the file is missing or empty.
    """
    names: dict[str, str] = {}
    lines: dict[str, int] = {}
    for line, content in enumerate(io.StringIO(file.text(), newline=None), 1):
        if not content.strip():
            continue
        with pass_faults_to(refuse):
            check_utf8([content], file, line)
            synset, *name = content.split(maxsplit=1)
            if not _NAME.fullmatch(synset):
                raise InputError(f"{file}:{line}: synset {show(synset)} cannot name a folder; {_NAME_RULE}")
            if lines.setdefault(synset, line) != line:
                raise InputError(f"{file}:{line}: duplicate synset {synset}, first on line {lines[synset]}; remove one")
            names[synset] = name[0].strip() if name else synset
    if not names:
        raise InputError(f"{file}: empty; give one line per class, such as 'n01440764 tench, Tinca tinca'")
    check_distinct(names, lambda synset: f"{file}:{lines[synset]}", refuse)
    return names


def _read_rows(file: FolderFile, synsets: Collection[str], refuse: Refuse) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Read a solution file; without synsets, only its column ImageId.

    This takes about 2 microseconds a row: 1,281,167 rows in under 3 s. Rows of another format than the module describes
    are rejected.

    Returns:
        Ids, bytes 'S'[N] in UTF-8, each a valid name of a file; labels, int32[N], -1 without synsets; and the lines on
        which the rows end.

    Raises: InputError if the file or a column is missing, or no row can be used.
    """
    columns = ("ImageId", "PredictionString")[: 2 if synsets else 1]
    index = {synset: label for label, synset in enumerate(synsets)}
    rows: list[tuple[bytes, int, int]] = []
    for line, image_id, *prediction in csv_rows(file, columns, refuse):
        boxes = _BOXES.fullmatch(prediction[0]) if prediction else None
        label = index.get(boxes[1]) if boxes else None
        if not _NAME.fullmatch(image_id):
            refuse(f"{file}:{line}: ImageId {show(image_id)} cannot name a file; {_NAME_RULE}")
        elif prediction and boxes is None:
            fault = f"PredictionString {show(prediction[0])} is no list of boxes of one synset"
            refuse(f"{file}:{line}: {fault}; write 'synset x1 y1 x2 y2' for each box")
        elif boxes and label is None:
            advice = f"correct it, or add it to {SYNSET_MAPPING}{nearest(boxes[1], index)}"
            refuse(f"{file}:{line}: unknown synset {show(boxes[1])}; {advice}")
        else:
            rows.append((image_id.encode(), -1 if label is None else label, line))
    if not rows:
        raise InputError(f"{file}: no rows below the header; give each image a row")
    names, labels, lines = zip(*rows, strict=True)
    return np.array(names), np.array(labels, np.int32), [*lines]
