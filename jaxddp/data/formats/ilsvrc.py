"""Reads Kaggle's ILSVRC archive: solution files list the images and their classes.

Images are where the archive unpacks them:

    ROOT/ILSVRC/Data/CLS-LOC/train/<synset>/<ImageId>.JPEG
    ROOT/ILSVRC/Data/CLS-LOC/{val,test}/<ImageId>.JPEG
"""

from os import PathLike

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.wording import show
from jaxddp.data.faults import Refuse, raise_fault
from jaxddp.data.format import Match, Place
from jaxddp.data.formats.solution_files import SYNSET_MAPPING, Solutions, read_mapping, read_solutions
from jaxddp.data.selection.subset import ClassSelection
from jaxddp.data.source import Split
from jaxddp.data.storage.catalog import DatasetEntry, place_of
from jaxddp.data.storage.home import Home, is_url, open_root
from jaxddp.data.table import ExampleTable
from jaxddp.registry import FORMATS

TRAIN_CSV = "LOC_train_solution.csv"
VAL_CSV = "LOC_val_solution.csv"
TEST_CSV = "LOC_sample_submission.csv"

_IMAGES = "ILSVRC/Data/CLS-LOC"

AnyPath = str | PathLike[str]


def train_solutions(
    root: AnyPath,
    csv: AnyPath = TRAIN_CSV,
    classes: ClassSelection = None,
    cache: AnyPath | None = None,
    *,
    refuse: Refuse = raise_fault,
) -> ExampleTable:
    """Reads the training examples, whose images are in one folder for each synset.

    Args:
        root: the directory of Kaggle's archive; its URL, `s3://bucket/imagenet`, `gs://…` or `https://…` (docs/data.md
            describes keys and endpoints); or a name in datasets.toml, if there is no directory of that name.
        csv: the solution file, in the root unless it is an absolute path. datasets.toml may replace the
            default.
        classes: see `Table.select`; None selects all, or those of the entry in datasets.toml.
        cache: a folder of this machine where fetched images of a URL are kept; see `CachedStore`.
        refuse: called with a message for each row that cannot be used; by default it raises an error.

    Raises:
        InputError: a file has a fault, or a link leads out of the root. The message names file, line and value.
        Unreachable: the store of a URL does not answer.
    """
    entry = _named(root)
    csv = entry.train or csv if csv == TRAIN_CSV else csv
    return _labelled(entry, csv, classes, cache, f"{_IMAGES}/train/{{synset}}/", refuse)


def val_solutions(
    root: AnyPath,
    csv: AnyPath = VAL_CSV,
    classes: ClassSelection = None,
    cache: AnyPath | None = None,
    *,
    refuse: Refuse = raise_fault,
) -> ExampleTable:
    """Reads the validation examples, whose images are in one folder; otherwise see `train_solutions`."""
    entry = _named(root)
    csv = entry.val or csv if csv == VAL_CSV else csv
    return _labelled(entry, csv, classes, cache, f"{_IMAGES}/val/", refuse)


def test_listing(root: AnyPath, csv: AnyPath = TEST_CSV, cache: AnyPath | None = None) -> ExampleTable:
    """Reads the names of the test images from the sample submission: labels are -1, and there are no classes.

    Only the column ImageId is read. Raises: see `train_solutions`.
    """
    home = _open(_named(root).path, csv, cache)
    solutions = read_solutions(home.file(csv), None)
    folder = np.array([f"{_IMAGES}/test/".encode()])
    return _within(_table(home, solutions, folder, {}), solutions, raise_fault)


def _named(root: AnyPath) -> DatasetEntry:
    return place_of(files.check_path(root, "root"))


def _labelled(
    entry: DatasetEntry, csv: AnyPath, classes: ClassSelection, cache: AnyPath | None, folder: str, refuse: Refuse
) -> ExampleTable:
    home = _open(entry.path, csv, cache)
    mapping = read_mapping(home.file(SYNSET_MAPPING), refuse)
    solutions = read_solutions(home.file(csv), tuple(mapping), refuse)
    folders = np.array([folder.format(synset=synset).encode() for synset in mapping])
    classes = entry.classes if classes is None else classes
    return _within(_table(home, solutions, folders, mapping).select(classes), solutions, refuse)


def _open(root: str, csv: AnyPath, cache: AnyPath | None) -> Home:
    for name, path in (("csv", csv), *([] if cache is None else [("cache", cache)])):
        files.check_path(path, name)
    return open_root(root, SYNSET_MAPPING, cache)


def _table(home: Home, solutions: Solutions, folders: np.ndarray, mapping: dict[str, str]) -> ExampleTable:
    path = np.strings.add(folders[solutions.label], np.strings.add(solutions.image_id, b".JPEG"))
    ids, names = tuple(mapping), tuple(mapping.values())
    return ExampleTable(home.store, solutions.image_id, path, solutions.label, ids, names)


def _within(table: ExampleTable, solutions: Solutions, refuse: Refuse) -> ExampleTable:
    """Returns the examples whose files are within the root after symbolic links are followed."""
    return table.without_links_out(
        lambda row: f"{solutions.where(table.id[row])}: ImageId {show(table.id[row].decode())}", refuse
    )


class SolutionFiles:
    """The format of Kaggle's archive: a URL, a directory with a solution file, or a config that names one."""

    description = f"a directory or a URL with {TRAIN_CSV} (Kaggle's ILSVRC archive)"

    def match(self, place: Place) -> Match:
        if is_url(place.address):
            return Match.NAMED
        if place.local is None:
            return Match.NONE
        if place.data.train or place.data.val or (place.local / TRAIN_CSV).is_file():
            return Match.NAMED
        near = (place.local.glob(pattern) for pattern in ("LOC_*", "*/LOC_*", "../LOC_*"))
        return Match.PARTLY if any(map(any, near)) else Match.NONE

    def divided(self, place: Place) -> bool:
        return True

    def open(self, place: Place, split: Split) -> ExampleTable:
        data, read, csv = place.data, train_solutions, place.data.train or TRAIN_CSV
        if split == "val":
            read, csv = val_solutions, data.val or VAL_CSV
        return read(place.address, csv, data.classes, data.local_cache, refuse=place.refuse)


FORMATS.add("solution files")(SolutionFiles())
