"""Solution files become an example table: which images there are, where they lie and of which class each one is.

    table = train_solutions("/data/imagenet", classes="0:200")
    table.num_examples, table.num_classes, table.class_names[table.label[0]]

The table is a handful of columns; no image is read. Images are expected where Kaggle's archive puts them:

    ROOT/ILSVRC/Data/CLS-LOC/train/<synset>/<ImageId>.JPEG
    ROOT/ILSVRC/Data/CLS-LOC/{val,test}/<ImageId>.JPEG
"""

import hashlib
import os
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path

import numpy as np

from jaxddp.data.files import links_out, unusable_images
from jaxddp.data.solutions import SYNSET_MAPPING, Solutions, open_root, read_mapping, read_solutions
from jaxddp.data.subset import ClassSelection, balanced_rows, chosen_classes
from jaxddp.errors import InputError
from jaxddp.wording import show

TRAIN_CSV = "LOC_train_solution.csv"
VAL_CSV = "LOC_val_solution.csv"
TEST_CSV = "LOC_sample_submission.csv"

_IMAGES = "ILSVRC/Data/CLS-LOC"


@dataclass(frozen=True, eq=False)
class ExampleTable:
    """N examples of K classes, as columns.

    Attributes:
        root: the directory that the paths are relative to; None where they are absolute.
        id: bytes 'S'[N], the ImageId, UTF-8.
        path: bytes 'S'[N], the image's file, with forward slashes, UTF-8.
        label: int32[N], dense class index 0..K-1; -1 where the class is unknown.
        class_ids: K synsets, so that `class_ids[label]` is an example's synset.
        class_names: K readable names.
        class_indices: K, each class's index in the whole mapping: what a dense label was before classes were selected.
    """

    root: Path | None
    id: np.ndarray
    path: np.ndarray
    label: np.ndarray
    class_ids: tuple[str, ...]
    class_names: tuple[str, ...]
    class_indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.id)

    @property
    def num_examples(self) -> int:
        return len(self)

    @property
    def num_classes(self) -> int:
        return len(self.class_ids)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, as hex, of the ids, paths, labels and classes in their order; wherever the root lies."""
        digest = hashlib.sha256(b"jaxddp example table 1\n")
        class_ids = np.array([class_id.encode() for class_id in self.class_ids], "S")
        for column in (self.id, self.path, class_ids):
            # Padding is not content: a column's width depends on which rows it once held.
            width = int(np.strings.str_len(column).max(initial=1))
            digest.update(b"%d %d\n" % (len(column), width))
            digest.update(column.astype(f"S{width}").tobytes())
        digest.update(self.label.astype("<i4").tobytes())
        return digest.hexdigest()

    def select(self, classes: ClassSelection) -> "ExampleTable":
        """Returns the examples of some classes, in their order, with labels made dense and `class_indices` kept.

        Dense labels follow this table's order of classes, however the selection is written, so a train and a validation
        table that select the same classes agree.

        Args:
            classes: `"0:200"`, `"n01440764,n01443537"`, a sequence of this table's class indices or ids; None for all.

        Raises:
            InputError: for an unknown class, a range out of bounds, or a selection that leaves nothing.
        """
        if classes is None:
            return self
        chosen = chosen_classes(classes, self.class_ids)
        # One more slot than classes: it is where an unknown label, -1, looks itself up.
        dense = np.full(self.num_classes + 1, -1, np.int32)
        dense[chosen] = np.arange(len(chosen))
        rows = np.flatnonzero(dense[self.label] >= 0)
        if not len(rows):
            raise InputError(
                f"classes {show(classes)}: none of the {len(self)} examples, the first of which is "
                f"{os.fsdecode(self.path[0])}, is of the {len(chosen)} selected; select other classes"
            )
        return replace(
            self._rows(rows),
            label=dense[self.label[rows]],
            class_ids=tuple(self.class_ids[i] for i in chosen),
            class_names=tuple(self.class_names[i] for i in chosen),
            class_indices=tuple(self.class_indices[i] for i in chosen),
        )

    def take(self, limit: int) -> "ExampleTable":
        """Returns at most `limit` examples, in their order, in which each class keeps its share; see `balanced_rows`.

        Raises:
            InputError: for a limit below 1.
        """
        return self._rows(balanced_rows(self.label, limit))

    def file_paths(self, rows: np.ndarray) -> np.ndarray:
        """Returns the absolute paths of some rows' images, bytes 'S'[len(rows)], encoded as the file system does."""
        prefix = b"" if self.root is None else os.fsencode(self.root) + b"/"
        return np.strings.add(prefix, self.path[rows])

    def check_images(self) -> None:
        """Checks that every image is a regular file within the root and not empty. No image is decoded.

        Raises:
            InputError: naming the first image that is not, and how many there are of these.
        """
        faults = unusable_images(self.root or Path("/"), self.path)
        if faults:
            row, fault = faults[0]
            raise InputError(
                f"{os.fsdecode(self.file_paths(np.array([row]))[0])}: {fault} ({len(faults)} of {len(self)} images "
                "cannot be used); put these images back, or take their rows out of the solution file"
            )

    def _rows(self, rows: np.ndarray) -> "ExampleTable":
        return replace(self, id=self.id[rows], path=self.path[rows], label=self.label[rows])


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
    return ExampleTable(home, solutions.image_id, path, solutions.label, ids, names, indices)


def _within_root(table: ExampleTable, home: Path, solutions: Solutions) -> ExampleTable:
    """Refuses a table in which a symbolic link leads an image out of the root: no row may reach other files."""
    if faults := links_out(home, table.path):
        row, fault = faults[0]
        raise InputError(
            f"{solutions.where(table.id[row])}: ImageId {show(table.id[row].decode())}: {fault}; put the file itself "
            "into the root, or remove the row"
        )
    return table
