"""The two protocols of data: a `Source` yields batches; a `Table` selects examples and reads single images.

Training and evaluation accept any object with the members of `Source`. Code that opens a data set
(`jaxddp.data.format`), checks it or selects from it needs a `Table`.
"""

from collections.abc import Iterator
from typing import Any, Literal, Protocol, Self

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, counted, refused
from jaxddp.data.batch import Batch
from jaxddp.data.labels import ClassSelection, Examples, Record, labels_of
from jaxddp.data.order import WHOLE, EvalOrder, Order, Shard
from jaxddp.data.soundness import Substitutes

Split = Literal["train", "val"]
"""The splits of a data set: training and validation."""


class Source(Examples, Protocol):
    """Examples that can be iterated in batches for training and evaluation.

    A batch has NumPy arrays with the shard of one process; see `Batch`. `jaxddp.data.order` makes all fields except
    the images. The methods that return iterators check their arguments immediately. Work in the background ends when
    the iterator is closed or deleted. Pixels are uint8; a source with another dtype also has a method
    `image_dtype(data)`, which returns it.
    """

    def default_data(self) -> DataConfig:
        """Return the default config for these images."""
        ...

    def image_shape(self, data: DataConfig) -> tuple[int, int, int]:
        """Return (H, W, C) of the images in training batches.

        For evaluation, pass `data.of_evaluation`. A run with growing images changes `data.image_size`. If the returned
        shape does not depend on `data.image_size`, the training step resizes the images on the device.
        """
        ...

    def check_evaluation(self, data: DataConfig) -> None:
        """Check that the evaluation settings of the config are valid for these images.

        Raises:
            InputError: a setting is invalid. The message names the key, or the first unusable image.
        """
        ...

    def check_resident(self, data: DataConfig) -> None:
        """Check that the pixels are the same in every epoch, so they can be cached on the devices (`data.cache`)."""
        ...

    def substitutes(self, data: DataConfig) -> Substitutes | None:
        """Return the substitutes for unusable images; None if an unusable image is an error or cannot occur."""
        ...

    def train_batches(
        self, order: Order, data: DataConfig, steps: range, shard: Shard = WHOLE, substitutes: Substitutes | None = None
    ) -> Iterator[Batch]:
        """Yield the training batches of the given steps; batches of an `EvalOrder` are padded as in `eval_batches`.

        Images of other steps are not read. Random crops depend only on (seed, epoch, row).

        Raises:
            InputError: the order is for another number of examples, its batch size is not divisible by `shard.count`,
                the config is out of range, or, while iterating, an image is unusable.
        """
        ...

    def eval_batches(self, order: EvalOrder, data: DataConfig, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Yield batches with every example once. In padding, mask and image are 0.

        If a table has files to verify (`verified`), its method has an additional argument `omissions`; see
        `ExampleTable.eval_batches`.

        Raises: see `train_batches`.
        """
        ...


class Table(Examples, Protocol):
    """Examples with methods to select some of them, and to read single images."""

    verified: Any
    """`Verified`: the images that this run or an earlier one verified; None if there are no files to verify."""

    @property
    def class_indices(self) -> tuple[int, ...]:
        """The index of each of the K classes before the selection, among all classes of the data set."""
        ...

    def select(self, classes: ClassSelection) -> Self:
        """Return the examples of some classes, in the order of the rows; all examples for None.

        The selected classes are numbered from 0 in the order of `class_ids`, independently of the order in `classes`.

        Raises:
            InputError: a class is unknown, or no example is left.
        """
        ...

    def take(self, limit: int) -> Self:
        """Return at most `limit` examples (1 or more), in proportion to the classes; see `balanced_rows`."""
        ...

    def rows(self, rows: np.ndarray) -> Self:
        """Return the examples of int[n] rows, in that order."""
        ...

    def without_labels(self) -> Self:
        """Return the same images without classes; every label is -1."""
        ...

    def check(self, data: DataConfig) -> None:
        """Check that every image exists, and that the config's size and crops are valid for it. No image is opened.

        Raises:
            InputError: an image is missing, or a setting is invalid. The message names the first image, or the key.
        """
        ...

    def read(self, row: int) -> bytes:
        """Return a row's image as it is stored: an encoded file, or pixels of `image_dtype`.

        Raises:
            InputError: the image is missing or cannot be read. The message names the image.
            Unreachable: a remote store did not answer within its deadline.
        """
        ...

    def record(self, row: int) -> Record:
        """Return the record that identifies a row in a manifest."""
        ...


class SourceTable(Source, Table, Protocol):
    """An object that is both a source and a table. Every data set format returns one."""


# The members that `check_source` requires. `fingerprint` is an annotation of the protocol, so `vars` omits it. This is
# intended, because `hasattr` would compute the fingerprint, which may take long.
_MEMBERS = [name for kind in (Source, Examples) for name in vars(kind) if not name.startswith("_")]


def check_source(source: Any, name: str) -> Source:
    """Return `source`. Raise `InputError` if it lacks a member of `Source`; the message calls it `name`."""
    missing = [member for member in _MEMBERS if not hasattr(source, member)]
    if len(missing) == len(_MEMBERS) or isinstance(source, type):
        advice = "give a table of open_data(PATH), an ArrayTable(images, labels, class_names) or another source"
        raise refused(name, source, advice)
    if missing:
        advice = f"it has no {missing[0]}, which a source has; see jaxddp.data.source.Source"
        raise refused(name, source, advice)
    return source


def check_labelled(source: Examples, what: str) -> None:
    """Check that every label is known.

    Args:
        what: a name of the data for messages, such as "training data".

    Raises:
        InputError: a label is unknown or not below the number of classes. The message names the first such image.
    """
    labels = labels_of(source)
    if labels.several:
        return
    beyond = np.flatnonzero(labels.values >= source.num_classes)
    if len(beyond):
        label, name = labels.values[beyond[0]], source.name(int(beyond[0]))
        count = counted(source.num_classes, "class")
        raise InputError(f"{what}: {name} has label {label} of {count}; number the classes from 0")
    unknown = np.flatnonzero(labels.values < 0)
    if not len(unknown):
        return
    count = f"{len(unknown)} of {counted(len(source), 'image')} have none"
    advice = "give data with labels, or predict their classes instead"
    raise InputError(f"{what}: {source.name(int(unknown[0]))} has no label ({count}); {advice}")


def image_dtype(source: Source, data: DataConfig) -> np.dtype:
    """Return the dtype of the pixels of a source: the result of its method `image_dtype`, or uint8 without one."""
    method = getattr(source, "image_dtype", None)
    return np.dtype(np.uint8) if method is None else method(data)
