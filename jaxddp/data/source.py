"""The two protocols of data: a `Source` yields batches; a `Table` selects examples and reads single images.

Training and evaluation take a source. A class of your own needs the members of `Source` and no others. Code that opens
a data set (`jaxddp.data.format`), checks it or selects from it takes a table. Code uses only the protocols' members.
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
"""The splits of a data set: training and validation."""


class Source(Examples, Protocol):
    """Examples, and batches of their images: all that training and evaluation need.

    Batches hold NumPy arrays with the shard of one process; see `Batch`. `jaxddp.data.columns` makes every field but
    the images. The iterators check their arguments at once, and stop their work when they are closed or dropped. Pixels
    are uint8; a source with other pixels also has a method `image_dtype(data)`, which returns their dtype.
    """

    def default_data(self) -> DataConfig:
        """Return the config that is used for these images if none is given."""
        ...

    def image_shape(self, data: DataConfig) -> tuple[int, int, int]:
        """Return (H, W, C) of the images in training batches.

        For evaluation, call it with the config `data.of_evaluation`. Images may grow during a run. If the shape does
        not depend on `data.image_size`, the source cannot resize them, so the training step does.
        """
        ...

    def check_evaluation(self, data: DataConfig) -> None:
        """Check that the evaluation settings of the config suit these images.

        Raises:
            InputError: it does not suit them. As in every check of this class, the message names the key, or the first
                image that cannot be used.
        """
        ...

    def check_resident(self, data: DataConfig) -> None:
        """Check that training reads the same pixels in every epoch, so that devices can keep them (`data.cache`)."""
        ...

    def substitutes(self, data: DataConfig) -> Substitutes | None:
        """Return the substitutes for unusable images; None if an unusable image ends the run or cannot occur."""
        ...

    def train_batches(
        self,
        order: Order,
        data: DataConfig,
        steps: range,
        shard: Shard = WHOLE,
        substitutes: Substitutes | None = None,
    ) -> Iterator[Batch]:
        """Yield the training batches of some steps; an `EvalOrder` is padded as in `eval_batches`.

        No other step is read. Random crops depend on (seed, epoch, row) alone.

        Raises:
            InputError: the order is for another number of examples, its batch does not divide by `shard.count`, or the
                config is out of range. The iterator raises it for an image that cannot be used.
        """
        ...

    def eval_batches(self, order: EvalOrder, data: DataConfig, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Yield every example once. If the last batch is padded, mask and image are 0 in the padding.

        If a table has files to verify (`verified`), its method has another argument, `omissions`; see
        `ExampleTable.eval_batches`.

        Raises: see `train_batches`.
        """
        ...


class Table(Examples, Protocol):
    """Examples that code can select, and whose images it can read one by one. Only a `Source` makes batches."""

    verified: Any
    """`Verified`: the images that are known to be sound, from this or an earlier run; None without files to verify."""

    @property
    def class_indices(self) -> tuple[int, ...]:
        """The index of each of the K classes in the whole data set, before classes were selected."""
        ...

    def select(self, classes: ClassSelection) -> Self:
        """Return the examples of some classes, in the order of the rows; all examples for None.

        The selected classes are numbered from 0 in the order of `class_ids`. The order in which `classes` names them
        has no effect, so training and validation have the same labels.

        Raises:
            InputError: a class is unknown, or no example is left.
        """
        ...

    def take(self, limit: int) -> Self:
        """Return at most `limit` examples (1 or more); each class keeps its share of them. See `balanced_rows`."""
        ...

    def rows(self, rows: np.ndarray) -> Self:
        """Return the examples of int[n] rows, in that order."""
        ...

    def without_labels(self) -> Self:
        """Return the same images without classes; every label is -1."""
        ...

    def check(self, data: DataConfig) -> None:
        """Check that every image exists, and suits the config's sizes and crops. No image is opened.

        Raises:
            InputError: an image or a key does not fit; the message names the first image, or the key.
        """
        ...

    def read(self, row: int) -> bytes:
        """Return a row's image as it is stored: an encoded file, or pixels of `image_dtype`.

        Raises:
            InputError: the image is missing or cannot be read; the message names it.
            Unreachable: a remote store did not answer within its deadline.
        """
        ...

    def record(self, row: int) -> Record:
        """Return the record that identifies a row in a manifest."""
        ...


class SourceTable(Source, Table, Protocol):
    """A source that is also a table; every format of data sets opens one."""


# The members that `check_source` looks for. `vars` leaves out `fingerprint`, which the protocol only annotates. This is
# intended: `hasattr` would compute the fingerprint, which may take long.
_MEMBERS = [name for kind in (Source, Examples) for name in vars(kind) if not name.startswith("_")]


def check_source(source: Any, name: str) -> Source:
    """Return the argument `source`, called `name` in messages. Raises: InputError if it lacks a member of `Source`."""
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
        what: the data in messages, such as "training data".

    Raises:
        InputError: a label is unknown or beyond the classes; the message names the first such image.
    """
    labels = labels_of(source)
    if labels.several:
        return
    if (sets := getattr(source, "label_sets", None)) is not None:
        sets.check_single(source.class_names)
    beyond = np.flatnonzero(labels.values >= source.num_classes)
    if len(beyond):
        label, name = labels.values[beyond[0]], source.name(int(beyond[0]))
        raise InputError(
            f"{what}: {name} has label {label} of {counted(source.num_classes, 'class')}; number the classes from 0"
        )
    unknown = np.flatnonzero(labels.values < 0)
    if not len(unknown):
        return
    raise InputError(
        f"{what}: {source.name(int(unknown[0]))} has no label ({len(unknown)} of {counted(len(source), 'image')} "
        "without); give data with labels, or predict their classes instead"
    )


def image_dtype(source: Source, data: DataConfig) -> np.dtype:
    """Return the dtype of the pixels in a source's batches: uint8, or what its method `image_dtype` returns."""
    method = getattr(source, "image_dtype", None)
    return np.dtype(np.uint8) if method is None else method(data)
