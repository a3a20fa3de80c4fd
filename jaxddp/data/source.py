"""The two protocols of data: a `Source` of batches, and a `Table` that one can choose from and look into.

What trains, or is measured, is a source; a class of your own needs its members and no others. What opens a data set
(`jaxddp.data.format`), checks it or selects from it asks for a table. No other code asks which kind any of them is.
"""

from collections.abc import Iterator
from typing import Any, Literal, Protocol, Self

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, refused
from jaxddp.core.wording import counted
from jaxddp.data.batch import Batch
from jaxddp.data.example_set import Examples, Record, labels_of
from jaxddp.data.order import WHOLE, EvalOrder, Order, Shard
from jaxddp.data.selection.subset import ClassSelection
from jaxddp.data.soundness.bad_images import Substitutes

Split = Literal["train", "val"]
"""The parts of a data set: what is trained on, and what is validated on."""


class Source(Examples, Protocol):
    """Examples, and the batches of their images: the least that trains, and that a state is measured on.

    Batches hold NumPy arrays of the shard of one process; see `Batch`, and `jaxddp.data.columns` for all but the
    images. Their iterators check their arguments at once, and end their work when they are closed or dropped. Pixels
    are uint8; a source of others has a method `image_dtype(data)`, too, which says so.
    """

    def default_data(self) -> DataConfig:
        """The config for these images where none is given."""
        ...

    def image_shape(self, data: DataConfig) -> tuple[int, int, int]:
        """(H, W, C) of the images of its batches; where it does not follow `data.image_size`, the step resizes images
        that grow. Evaluation's is that of `data.of_evaluation`."""
        ...

    def check_evaluation(self, data: DataConfig) -> None:
        """Checks that the config's evaluation suits these images.

        Raises `InputError`, which names the key, or the first image that cannot be used. So do the other checks.
        """
        ...

    def check_resident(self, data: DataConfig) -> None:
        """Checks that training sees the same images in every epoch, so that devices can keep them (`data.cache`)."""
        ...

    def substitutes(self, data: DataConfig) -> Substitutes | None:
        """What replaces images that cannot be used; None where they end the run, or cannot occur."""
        ...

    def train_batches(
        self,
        order: Order,
        data: DataConfig,
        steps: range,
        shard: Shard = WHOLE,
        substitutes: Substitutes | None = None,
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

        Of a table with files to verify (`verified`), `omissions` may be given, too; see `ExampleTable.eval_batches`.
        """
        ...


class Table(Examples, Protocol):
    """Examples that one can choose from, and single images of them; how they come in batches is a source's."""

    verified: Any
    """`Verified`, of which images this machine has found sound before; None where there are no files to verify."""

    @property
    def class_indices(self) -> tuple[int, ...]:
        """K, each class's index in the data set before classes were selected."""
        ...

    def select(self, classes: ClassSelection) -> Self:
        """The examples of some classes, in their order; all examples for None.

        Labels are made dense in the order of `class_ids`, however the selection is written, so that train and
        validation agree. Raises `InputError` for an unknown class, or where nothing is left.
        """
        ...

    def take(self, limit: int) -> Self:
        """At most `limit` examples (from 1), in their order, in each class its share of them; see `balanced_rows`."""
        ...

    def rows(self, rows: np.ndarray) -> Self:
        """The examples of int[n] rows, in that order."""
        ...

    def without_labels(self) -> Self:
        """The same images, of no classes, with labels of -1."""
        ...

    def check(self, data: DataConfig) -> None:
        """Checks that every image is there, and suits the config's sizes and crops; no image is opened.

        Raises `InputError`, which names the first image that cannot be used, or the key.
        """
        ...

    def read(self, row: int) -> bytes:
        """A row's image as it is stored: an encoded file, or pixels of `image_dtype`.

        Raises:
            InputError: it is missing or cannot be read; names it.
            Unreachable: a store elsewhere gave no answer within its deadline.
        """
        ...

    def record(self, row: int) -> Record:
        """What identifies a row in a manifest."""
        ...


class SourceTable(Source, Table, Protocol):
    """Both, as every format of data sets opens them."""


# Of a cached fingerprint one cannot ask without making it, which may take long.
_MEMBERS = [name for kind in (Source, Examples) for name in vars(kind) if not name.startswith("_")]


def check_source(source: Any, name: str) -> Source:
    """An argument that has the members of a source. Raises: InputError; names the argument, and what it is instead."""
    missing = [member for member in _MEMBERS if not hasattr(source, member)]
    if len(missing) == len(_MEMBERS) or isinstance(source, type):
        advice = "give a table of open_data(PATH), an ArrayTable(images, labels, class_names) or another source"
        raise refused(name, source, advice)
    if missing:
        advice = f"it has no {missing[0]}, which a source has; see jaxddp.data.source.Source"
        raise refused(name, source, advice)
    return source


def check_labelled(source: Examples, what: str) -> None:
    """Raises `InputError` where a label is unknown; names the first such image of `what`, such as "training data"."""
    labels = labels_of(source)
    if labels.several:
        return
    if (sets := getattr(source, "label_sets", None)) is not None:
        sets.check_single(source.class_names)
    beyond = np.flatnonzero(labels.values >= source.num_classes)
    if len(beyond):
        label, name = labels.values[beyond[0]], source.name(int(beyond[0]))
        raise InputError(
            f"{what}: {name} has label {label} of {counted(source.num_classes, 'class')}; give 0 to the last"
        )
    unknown = np.flatnonzero(labels.values < 0)
    if not len(unknown):
        return
    raise InputError(
        f"{what}: {source.name(int(unknown[0]))} has no label ({len(unknown)} of {counted(len(source), 'image')} "
        "without); give data with labels, or predict their classes instead"
    )


def image_dtype(source: Source, data: DataConfig) -> np.dtype:
    """Of the pixels in a source's batches, uint8 or uint16: what its `image_dtype(data)` says; uint8 without one."""
    told = getattr(source, "image_dtype", None)
    return np.dtype(np.uint8) if told is None else told(data)
