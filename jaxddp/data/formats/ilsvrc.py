"""Kaggle's ILSVRC archive as example tables: solution files say which images there are and of which class each one is.

Images are expected where the archive puts them:

    ROOT/ILSVRC/Data/CLS-LOC/train/<synset>/<ImageId>.JPEG
    ROOT/ILSVRC/Data/CLS-LOC/{val,test}/<ImageId>.JPEG
"""

from os import PathLike
from pathlib import Path

import numpy as np

from jaxddp.data.formats.solution_files import SYNSET_MAPPING, Solutions, open_root, read_mapping, read_solutions
from jaxddp.data.storage.local import LocalFiles, links_out
from jaxddp.data.subset import ClassSelection
from jaxddp.data.table import ExampleTable
from jaxddp.errors import InputError
from jaxddp.wording import show

TRAIN_CSV = "LOC_train_solution.csv"
VAL_CSV = "LOC_val_solution.csv"
TEST_CSV = "LOC_sample_submission.csv"

_IMAGES = "ILSVRC/Data/CLS-LOC"


def train_solutions(
    root: str | PathLike[str], csv: str | PathLike[str] = TRAIN_CSV, classes: ClassSelection = None
) -> ExampleTable:
    """Reads the training examples, whose images lie in one folder a synset.

    Args:
        root: the directory of Kaggle's archive.
        csv: the solution file, in the root unless it is an absolute path.
        classes: as in `ExampleTable.select`.

    Raises:
        InputError: naming file, line and value of what is wrong in the files, or the link that leads out of the root.
    """
    return _labelled(root, csv, classes, f"{_IMAGES}/train/{{synset}}/")


def val_solutions(
    root: str | PathLike[str], csv: str | PathLike[str] = VAL_CSV, classes: ClassSelection = None
) -> ExampleTable:
    """Reads the validation examples, whose images lie in one folder; otherwise as `train_solutions`."""
    return _labelled(root, csv, classes, f"{_IMAGES}/val/")


def test_listing(root: str | PathLike[str], csv: str | PathLike[str] = TEST_CSV) -> ExampleTable:
    """Reads the names of the test images from the sample submission: labels are -1, and there are no classes.

    Raises:
        InputError: as `train_solutions` does. What stands beside ImageId is not read.
    """
    home = open_root(root)
    solutions = read_solutions(home / csv, None)
    folder = np.array([f"{_IMAGES}/test/".encode()])
    return _within_root(_table(home, solutions, folder, {}), home, solutions)


def _labelled(
    root: str | PathLike[str], csv: str | PathLike[str], classes: ClassSelection, folder: str
) -> ExampleTable:
    home = open_root(root)
    mapping = read_mapping(home / SYNSET_MAPPING)
    solutions = read_solutions(home / csv, tuple(mapping))
    folders = np.array([folder.format(synset=synset).encode() for synset in mapping])
    return _within_root(_table(home, solutions, folders, mapping).select(classes), home, solutions)


def _table(home: Path, solutions: Solutions, folders: np.ndarray, mapping: dict[str, str]) -> ExampleTable:
    path = np.strings.add(folders[solutions.label], np.strings.add(solutions.image_id, b".JPEG"))
    ids, names, indices = tuple(mapping), tuple(mapping.values()), tuple(range(len(mapping)))
    return ExampleTable(LocalFiles(home), solutions.image_id, path, solutions.label, ids, names, indices)


def _within_root(table: ExampleTable, home: Path, solutions: Solutions) -> ExampleTable:
    """Refuses a table in which a symbolic link leads an image out of the root: no row may reach other files."""
    if faults := links_out(home, table.path):
        row, fault = faults[0]
        raise InputError(
            f"{solutions.where(table.id[row])}: ImageId {show(table.id[row].decode())}: {fault}; put the file itself "
            "into the root, or remove the row"
        )
    return table
