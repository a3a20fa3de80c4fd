"""Data sets that fit in memory, and their batches, without TensorFlow."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxddp.data.batch import Batch
from jaxddp.data.order import EvalOrder, Order, SampleOrder
from jaxddp.data.source import check_order, columns
from jaxddp.data.subset import ClassSelection, balanced_rows, chosen_classes
from jaxddp.errors import InputError

# Images that do not lie in memory one after the other are copied, and then not all at once.
_HASHED_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class ArrayTable:
    """Images and labels held in memory.

    Args:
        images: uint8[N, H, W, C], as decoded; normalizing happens on the device. They may be mapped into memory
            (`np.load(mmap_mode="r")`): batches read their own rows, and only the fingerprint reads all.
        labels: integers [N], dense class indices 0..K-1; kept as int32.
        class_names: K readable names.

    Raises:
        InputError: a wrong shape or dtype, different lengths, no example, a label out of range.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        images, labels = np.asarray(self.images), np.asarray(self.labels)
        check_images(images)
        check_labels(labels, len(images), len(self.class_names))
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "labels", labels.astype(np.int32))
        object.__setattr__(self, "class_names", tuple(self.class_names))

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_examples(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        _, height, width, channels = self.images.shape
        return height, width, channels

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 of the content: the same on every machine, and another one when a pixel, label or name differs."""
        digest = hashlib.sha256(repr((self.images.shape, self.class_names)).encode())
        for start in range(0, len(self), _HASHED_AT_ONCE):
            digest.update(np.ascontiguousarray(self.images[start : start + _HASHED_AT_ONCE]).data)
        digest.update(self.labels.astype("<i4").tobytes())
        return digest.hexdigest()

    def select(self, classes: ClassSelection) -> "ArrayTable":
        """The examples of some classes, in their order, with labels made dense; `classes` as in `ExampleTable.select`.

        Raises:
            InputError: an unknown class, a range out of bounds, or a selection that leaves nothing.
        """
        if classes is None:
            return self
        chosen = chosen_classes(classes, self.class_names)
        dense = np.full(self.num_classes, -1, np.int32)
        dense[chosen] = np.arange(len(chosen))
        rows = np.flatnonzero(dense[self.labels] >= 0)
        if not rows.size:
            raise InputError(f"classes {classes!r}: no example is of these classes; select others")
        return ArrayTable(self.images[rows], dense[self.labels[rows]], tuple(self.class_names[i] for i in chosen))

    def take(self, limit: int) -> "ArrayTable":
        """At most `limit` examples, in their order, in which each class keeps its share; see `balanced_rows`.

        Raises:
            InputError: a limit below 1.
        """
        rows = balanced_rows(self.labels, limit)
        if len(rows) == len(self):
            return self
        return ArrayTable(self.images[rows], self.labels[rows], self.class_names)


def array_batches(
    table: ArrayTable, order: SampleOrder, *, start: int, stop: int, index: int = 0, count: int = 1
) -> Iterator[Batch]:
    """The training batches of steps [start, stop), shard `index` of `count`.

    Raises:
        InputError: the order is for another number of examples, or its batch does not divide by `count`.
    """
    return _batches(table, order, range(start, stop), index, count)


def array_eval_batches(table: ArrayTable, order: EvalOrder, *, index: int = 0, count: int = 1) -> Iterator[Batch]:
    """Every example once; where the last batch is padded, mask and image are 0.

    Raises:
        InputError: the order is for another number of examples, or its batch does not divide by `count`.
    """
    return _batches(table, order, range(order.num_batches), index, count)


def _batches(table: ArrayTable, order: Order, steps: range, index: int, count: int) -> Iterator[Batch]:
    check_order(table, order, index, count)
    return (_with_images(table, columns(table.labels, order, step, index, count)) for step in steps)


def _with_images(table: ArrayTable, batch: Batch) -> Batch:
    images = table.images[batch.row]
    images[batch.mask == 0] = 0
    return batch._replace(image=images)


def check_images(images: np.ndarray) -> None:
    """Refuses what are not images of an `ArrayTable`; no pixel is read.

    Raises:
        InputError: a shape that is not [N, H, W, C], a dtype that is not uint8, or nothing there.
    """
    if images.ndim != 4:
        raise InputError(f"images of shape {images.shape}: give [N, H, W, C], with C = 1 for gray")
    if images.dtype != np.uint8:
        raise InputError(f"images of {images.dtype}: give uint8 from 0 to 255; normalizing happens on the device")
    if 0 in images.shape:
        raise InputError(f"images of shape {images.shape}: a data set needs at least one example and one pixel")


def check_labels(labels: np.ndarray, num_examples: int, num_classes: int) -> None:
    """Refuses what are not labels of an `ArrayTable`.

    Raises:
        InputError: not one integer for each example, or one outside 0..num_classes-1.
    """
    if labels.shape != (num_examples,):
        raise InputError(f"labels of shape {labels.shape} for {num_examples} images: give one label per image")
    if not np.issubdtype(labels.dtype, np.integer):
        raise InputError(f"labels of {labels.dtype}: give integers, dense class indices from 0")
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        row = wrong[0]
        raise InputError(f"label {labels[row]} of row {row}: {num_classes} class names allow 0..{num_classes - 1}")
