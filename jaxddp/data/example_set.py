"""`Examples`: the protocol of labelled examples, however the images are stored and read."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxddp.core.wording import counted, some
from jaxddp.data.labels import Labels


class Record(NamedTuple):
    """Identifies one example. All values can be written as JSON."""

    id: str | int
    """The id of the example; the number of its row if it has none."""
    path: str | None = None
    """The file in the data set that holds the image; None if the image is in memory."""
    offset: int | None = None
    """The position of the image's record in that file; None if the file is the image."""


class Examples(Protocol):
    """N examples of K classes."""

    # An attribute and not a property, because type checkers do not accept a `cached_property` in place of a property.
    fingerprint: Any
    """A string. Two data sets have different fingerprints if an example or a class differs."""

    @property
    def labels(self) -> np.ndarray:
        """int32[N], the class index of each example, 0..K-1; -1 if the class is unknown.

        If examples may have several labels, or none, the array is uint8[N, K]: 1 for each class of an example, else 0.
        """
        ...

    @property
    def class_ids(self) -> tuple[str, ...]:
        """The ids of the K classes. Data sets are compared by them. Classes without ids have their names as ids."""
        ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """K readable names."""
        ...

    @property
    def num_classes(self) -> int:
        """The number K of classes."""
        ...

    def __len__(self) -> int: ...

    @property
    def pixel_shape(self) -> tuple[int, int, int] | None:
        """(H, W, C) of each image if images are kept as pixels; None if they are encoded files."""
        ...

    def name(self, row: int) -> str:
        """Return a readable name of a row's image, such as its path."""
        ...


def id_of(examples: Examples, row: int) -> str:
    """Return the id of a row from its record; the number of the row if the examples have no records."""
    record = getattr(examples, "record", Record)
    return str(record(row).id)


def labels_of(examples: Examples) -> Labels:
    """Return the labels of examples, with ids and names of the classes."""
    return Labels(examples.labels, tuple(examples.class_ids), tuple(examples.class_names))


def in_a_line(examples: Examples, images: str) -> str:
    """Return a one-line `repr` of examples without their columns; `images` describes the images."""
    names = f" ({some(examples.class_names)})" if examples.num_classes else ""
    classes = f"{counted(examples.num_classes, 'class')}{names}"
    return f"{type(examples).__name__}({counted(len(examples), 'example')} of {classes}, {images})"
