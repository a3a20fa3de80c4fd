"""The example table: which images there are, where they lie and of which class each one is.

    table = train_solutions("/data/imagenet", classes="0:200")
    table.num_examples, table.num_classes, table.class_names[table.label[0]]

The table is a handful of columns; no image is read for it. Where its images lie is the business of its store.
"""

import hashlib
import os
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxddp.data.storage.store import Store
from jaxddp.data.subset import ClassSelection, balanced_rows, chosen_classes
from jaxddp.errors import InputError
from jaxddp.wording import show


@dataclass(frozen=True, eq=False)
class ExampleTable:
    """N examples of K classes, as columns.

    Attributes:
        store: where the images lie: a directory, record files, an object store.
        id: bytes 'S'[N], the ImageId, UTF-8.
        path: bytes 'S'[N], the image's file in the store, with forward slashes, UTF-8.
        label: int32[N], dense class index 0..K-1; -1 where the class is unknown.
        class_ids: K synsets, so that `class_ids[label]` is an example's synset.
        class_names: K readable names.
        class_indices: K, each class's index in the whole mapping: what a dense label was before classes were selected.
        offset: int64[N], where in its file an image's record is, for stores whose files hold many; None where a file
            is an image.
    """

    store: Store
    id: np.ndarray
    path: np.ndarray
    label: np.ndarray
    class_ids: tuple[str, ...]
    class_names: tuple[str, ...]
    class_indices: tuple[int, ...]
    offset: np.ndarray | None = None

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
        """SHA-256, as hex, of the ids, paths, labels, classes and offsets in their order; wherever the store lies."""
        digest = hashlib.sha256(b"jaxddp example table 1\n")
        class_ids = np.array([class_id.encode() for class_id in self.class_ids], "S")
        for column in (self.id, self.path, class_ids):
            # Padding is not content: a column's width depends on which rows it once held.
            width = int(np.strings.str_len(column).max(initial=1))
            digest.update(b"%d %d\n" % (len(column), width))
            digest.update(column.astype(f"S{width}").tobytes())
        digest.update(self.label.astype("<i4").tobytes())
        if self.offset is not None:
            digest.update(self.offset.astype("<i8").tobytes())
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

    def name(self, row: int) -> str:
        """What a person calls a row's image: its file, and its record where a file holds many."""
        return self.store.name(*self._place(row))

    def read(self, row: int) -> bytes:
        """A row's image, as it is encoded.

        Raises:
            InputError, Unreachable: as the store's `read`.
        """
        return self.store.read(*self._place(row))

    def check_images(self) -> None:
        """Checks that every image is there, as far as its store can tell without opening it.

        Raises:
            InputError: naming the first image that is not, and how many there are of these.
        """
        if faults := self.store.faults(self.path):
            row, fault = faults[0]
            raise InputError(
                f"{self.name(row)}: {fault} ({len(faults)} of {len(self)} images cannot be used); put these images "
                "back, or take them out of the data set"
            )

    def _rows(self, rows: np.ndarray) -> "ExampleTable":
        offset = None if self.offset is None else self.offset[rows]
        return replace(self, id=self.id[rows], path=self.path[rows], label=self.label[rows], offset=offset)

    def _place(self, row: int) -> tuple[bytes, int]:
        return bytes(self.path[row]), 0 if self.offset is None else int(self.offset[row])
