"""The protocol of sources of examples, and the columns of their batches.

A new kind of source is one file with a class that has these members; no other code asks which kind a source is.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.batch import Batch
from jaxddp.data.labels import is_multi_label
from jaxddp.data.order import WHOLE, EvalOrder, Order, Shard
from jaxddp.data.subset import ClassSelection
from jaxddp.errors import InputError
from jaxddp.wording import counted, refusal, some

if TYPE_CHECKING:
    from jaxddp.data.substitutes import Substitutes

Split = Literal["train", "val"]
"""The parts of a data set: what is trained on, and what is validated on."""


class Record(NamedTuple):
    """What identifies an example, in JSON's types."""

    id: str | int
    """Its row, where it has no id."""
    path: str | None = None
    """The file in the data set that holds the image, where one does."""
    offset: int | None = None
    """Where in that file the image's record is; None where the file is the image."""


class Source(Protocol):
    """N examples of K classes: a table of files, arrays in memory, or any other class with these members.

    Batches hold NumPy arrays of the shard of one process; see `Batch`. Their iterators check their arguments at once,
    and end their work when they are closed or dropped.
    """

    # Not properties: type checkers do not accept a cached property for one.
    fingerprint: Any
    """str, which differs where any example or class does."""
    verified: Any
    """`Verified`, of which images this machine has found sound before; None where there are no files to verify."""

    @property
    def labels(self) -> np.ndarray:
        """int32[N], class indices 0..K-1; -1 where the class is unknown. Where an example may have several labels, or
        none, uint8[N, K], 1 for each of its classes."""
        ...

    @property
    def class_ids(self) -> tuple[str, ...]:
        """K ids, by which data sets are compared; the names where classes have no ids."""
        ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """K names for people."""
        ...

    @property
    def class_indices(self) -> tuple[int, ...]:
        """K, each class's index in the data set before classes were selected."""
        ...

    @property
    def num_classes(self) -> int: ...

    def __len__(self) -> int: ...

    def select(self, classes: ClassSelection) -> "Source":
        """The examples of some classes, in their order; all examples for None.

        Labels are made dense in the order of `class_ids`, however the selection is written, so that train and
        validation agree. Raises `InputError` for an unknown class, or where nothing is left.
        """
        ...

    def take(self, limit: int) -> "Source":
        """At most `limit` examples (from 1), in their order, in each class its share of them; see `balanced_rows`."""
        ...

    def rows(self, rows: np.ndarray) -> "Source":
        """The examples of int[n] rows, in that order."""
        ...

    def without_labels(self) -> "Source":
        """The same images, of no classes, with labels of -1."""
        ...

    # --- A config and these images ---

    def default_data(self) -> DataConfig:
        """The config for these images where none is given."""
        ...

    def image_shape(self, data: DataConfig) -> tuple[int, int, int]:
        """(H, W, C) of the images of its batches; where it does not follow `data.image_size`, the step resizes images
        that grow. Evaluation's is that of `data.of_evaluation`."""
        ...

    def check(self, data: DataConfig) -> None:
        """Checks that every image is there, and suits the config's sizes and crops; no image is opened.

        Raises `InputError`, which names the first image that cannot be used, or the key. So do the other checks.
        """
        ...

    def check_evaluation(self, data: DataConfig) -> None:
        """Checks that the config's evaluation suits these images."""
        ...

    def check_resident(self, data: DataConfig) -> None:
        """Checks that training sees the same images in every epoch, so that devices can keep them (`data.cache`)."""
        ...

    # --- Batches ---

    def substitutes(self, data: DataConfig) -> "Substitutes | None":
        """What replaces images that cannot be used; None where they end the run, or cannot occur."""
        ...

    def train_batches(
        self,
        order: Order,
        data: DataConfig,
        steps: range,
        shard: Shard = WHOLE,
        substitutes: "Substitutes | None" = None,
    ) -> Iterator[Batch]:
        """The batches of some steps, with the pixels of training; of an `EvalOrder` padded as in `eval_batches`.

        No other step is read; randomness follows from (seed, epoch, row) alone.

        Raises:
            InputError: the order is for another number of examples, its batch does not divide by `shard.count`, or the
                config is out of range; from the iterator, for an image that cannot be used.
        """
        ...

    def eval_batches(self, order: EvalOrder, data: DataConfig, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Every example once. Where the last batch is padded, mask and image are 0. Raises: as `train_batches`.

        Where there are files to verify (`verified`), `omissions` may be given too; see `ExampleTable.eval_batches`.
        """
        ...

    # --- Single images ---

    @property
    def pixel_shape(self) -> tuple[int, int, int] | None:
        """(H, W, C) of each image where `read` gives plain pixels; None where it gives encoded files."""
        ...

    def read(self, row: int) -> bytes:
        """A row's image as it is stored: an encoded file, or pixels of `image_dtype`.

        Raises:
            InputError: it is missing or cannot be read; names it.
            Unreachable: a store elsewhere gave no answer within its deadline.
        """
        ...

    def name(self, row: int) -> str:
        """What a person calls a row's image."""
        ...

    def record(self, row: int) -> Record:
        """What identifies a row in a manifest."""
        ...


_MEMBERS = (
    *("labels", "class_ids", "class_names", "num_classes", "default_data", "image_shape", "check_evaluation"),
    *("check_resident", "substitutes", "train_batches", "eval_batches", "name"),
)
"""Without which nothing trains or is measured; a fingerprint may take long."""


def image_dtype(source: Source, data: DataConfig) -> np.dtype:
    """Of the pixels in a source's batches, uint8 or uint16: what its `image_dtype(data)` says; uint8 without one."""
    told = getattr(source, "image_dtype", None)
    return np.dtype(np.uint8) if told is None else told(data)


def in_a_line(source: Source, images: str) -> str:
    """A source for people, its columns left out; `images` says what and where they are."""
    names = f" ({some(source.class_names)})" if source.num_classes else ""
    classes = f"{counted(source.num_classes, 'class')}{names}"
    return f"{type(source).__name__}({counted(len(source), 'example')} of {classes}, {images})"


def check_source(source: Any, name: str) -> Source:
    """An argument that has the members of a source. Raises: InputError; names the argument, and what it is instead."""
    missing = [member for member in _MEMBERS if not hasattr(source, member)]
    if len(missing) == len(_MEMBERS) or isinstance(source, type):
        advice = "give a table of open_data(PATH), an ArrayTable(images, labels, class_names) or another source"
        raise InputError(refusal(name, source, advice))
    if missing:
        advice = f"it has no {missing[0]}, which a source has; see jaxddp.data.source.Source"
        raise InputError(refusal(name, source, advice))
    return source


def check_labelled(source: Source, what: str) -> None:
    """Raises `InputError` where a label is unknown; names the first such image of `what`, such as "training data"."""
    if is_multi_label(source):
        return
    if (sets := getattr(source, "label_sets", None)) is not None:
        sets.check_single(source.class_names)
    beyond = np.flatnonzero(source.labels >= source.num_classes)
    if len(beyond):
        label, name = source.labels[beyond[0]], source.name(int(beyond[0]))
        raise InputError(
            f"{what}: {name} has label {label} of {counted(source.num_classes, 'class')}; give 0 to the last"
        )
    unknown = np.flatnonzero(source.labels < 0)
    if not len(unknown):
        return
    raise InputError(
        f"{what}: {source.name(int(unknown[0]))} has no label ({len(unknown)} of {counted(len(source), 'image')} "
        "without); give data with labels, or predict their classes instead"
    )


def sample_images(source: Source, data: DataConfig, count: int) -> np.ndarray:
    """Training images without random crops, [count, H, W, C], of each class its share; all if there are fewer.

    Raises `InputError` for an image that cannot be used.
    """
    few, whole = source.take(count), dataclasses.replace(data, crop="whole")
    order, substitutes = EvalOrder(len(few), len(few)), few.substitutes(whole)
    return next(iter(few.train_batches(order, whole, range(1), substitutes=substitutes))).image


def columns(labels: np.ndarray, order: Order, step: int, shard: Shard = WHOLE) -> Batch:
    """A shard of a step's batch without its images; padding has mask, label and row 0. Raises: as `Shard.of`."""
    rows = shard.of(order.rows(step))
    real = rows >= 0
    row = np.where(real, rows, 0).astype(np.int32)
    several = labels.ndim == 2
    return Batch(
        image=None,
        label=np.where(real[:, None] if several else real, labels[row], 0).astype(np.uint8 if several else np.int32),
        mask=real.astype(np.float32),
        row=row,
        epoch=shard.of(order.epochs(step)).astype(np.int32),
    )


def stacked_columns(labels: np.ndarray, order: Order, steps: range, shard: Shard = WHOLE) -> Batch:
    """The `columns` of several steps side by side, each [B, len(steps)]: step `steps[k]` is column k.

    The batch's axis is the first, so that `Topology.place` shards it as it does a batch.
    """
    each = [columns(labels, order, step, shard) for step in steps]
    return Batch(*(None if parts[0] is None else np.stack(parts, axis=1) for parts in zip(*each, strict=True)))


def check_order(source: Source, order: Order, shard: Shard) -> None:
    """Raises `InputError` where an order is for another number of examples, or as `Shard.of`."""
    if order.num_examples != len(source):
        raise InputError(
            f"an order of {counted(order.num_examples, 'example')} for {len(source)}: make an order of these"
        )
    shard.of(order.rows(0))
