"""Reads Kaggle's ILSVRC archive: solution files list the images and their classes.

The archive unpacks the images to:

    ROOT/ILSVRC/Data/CLS-LOC/train/<synset>/<ImageId>.JPEG
    ROOT/ILSVRC/Data/CLS-LOC/{val,test}/<ImageId>.JPEG
"""

from os import PathLike

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import show
from jaxddp.data.faults import Refuse, raise_fault
from jaxddp.data.format import Match, Place
from jaxddp.data.formats.solution_files import SYNSET_MAPPING, Solutions, read_mapping, read_solutions
from jaxddp.data.selection.subset import ClassSelection
from jaxddp.data.source import Split
from jaxddp.data.storage.catalog import DatasetEntry, find_dataset
from jaxddp.data.storage.data_root import DataRoot, is_url, open_root
from jaxddp.data.storage.shards import SHARDS
from jaxddp.data.table import ExampleTable
from jaxddp.registry import FORMATS

TRAIN_CSV = "LOC_train_solution.csv"
VAL_CSV = "LOC_val_solution.csv"
TEST_CSV = "LOC_sample_submission.csv"

_IMAGES = "ILSVRC/Data/CLS-LOC"
_VAL_IDS = b"_val_"
"""A part of the ids of validation images. The id of a training image begins with its synset and "_"."""

AnyPath = str | PathLike[str]


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
    entry = _resolve(root)
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
    entry = _resolve(root)
    csv = entry.val or csv if csv == VAL_CSV else csv
    return _read_labelled(entry, csv, classes, cache, "val", refuse)


def test_listing(root: AnyPath, csv: AnyPath = TEST_CSV, cache: AnyPath | None = None) -> ExampleTable:
    """Read the names of the test images from the sample submission: labels are -1, and there are no classes.

    Only the column ImageId is read. Raises: see `train_solutions`.
    """
    data_root = _open_root(_resolve(root).path, csv, cache)
    solutions = read_solutions(data_root.file(csv), None)
    folders = np.array(f"{_IMAGES}/test/".encode())
    return _without_links_out(_make_table(data_root, solutions, folders, {}), solutions, raise_fault)


def _resolve(root: AnyPath) -> DatasetEntry:
    return find_dataset(files.check_path(root, "root"))


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
    return table.without_links_out(
        lambda row: f"{solutions.where(table.id[row])}: ImageId {show(table.id[row].decode())}", refuse
    )


def _is_shard(name: str) -> bool:
    return name.endswith(SHARDS)


class SolutionFiles:
    """The format of Kaggle's archive: a URL, a directory with a solution file, or a config with such a file."""

    description = f"a directory or a URL with {TRAIN_CSV} (Kaggle's ILSVRC archive)"

    def match(self, place: Place) -> Match:
        if is_url(place.address):
            return Match.WHOLE
        if place.local is None:
            return Match.NONE
        named = [name for name in (place.data.train, place.data.val) if name]
        # Other formats have splits and shards, which are not files of this name.
        is_named = any(name.endswith(".csv") or (place.local / name).is_file() for name in named if not _is_shard(name))
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
