"""`Examples`: the protocol of labelled examples, in memory or in files."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxddp.core.wording import counted, some
from jaxddp.data.labels import Labels


class Record(NamedTuple):
    """The identification of one example, with values that JSON can represent."""

    id: str | int
    """The id of the example; its row number if it has no id."""
    path: str | None = None
    """The file in the data set that holds the image; None if the image is in memory."""
    offset: int | None = None
    """The position of the image's record in the file `path`; None if the whole file is the image."""


class Examples(Protocol):
    """N examples of K classes."""

    # An attribute and not a property, because type checkers do not accept a `cached_property` in place of a property.
    fingerprint: Any
    """A string that differs between two data sets if an example or a class differs."""

    @property
    def labels(self) -> np.ndarray:
        """int32[N], the class index of each example, 0..K-1; -1 if the class is unknown.

        Multi-hot uint8[N, K] if examples may have several labels or none.
        """
        ...

    @property
    def class_ids(self) -> tuple[str, ...]:
        """The ids of the K classes, by which data sets are compared. The id of a class without an id is its name."""
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
        """(H, W, C) of each image if images are stored as pixels; None if they are encoded files."""
        ...

    def name(self, row: int) -> str:
        """Return a readable name of a row's image, such as its path."""
        ...


def id_of(examples: Examples, row: int) -> str:
    """Return the id of a row from its record; the row number if the examples have no records."""
    record = getattr(examples, "record", Record)
    return str(record(row).id)


def labels_of(examples: Examples) -> Labels:
    """Return the labels of examples, with the ids and names of the classes."""
    return Labels(examples.labels, tuple(examples.class_ids), tuple(examples.class_names))


def one_line_repr(examples: Examples, images: str) -> str:
    """Return a one-line `repr` of examples: their number, their classes, and `images`, a description of the images."""
    names = f" ({some(examples.class_names)})" if examples.num_classes else ""
    classes = f"{counted(examples.num_classes, 'class')}{names}"
    return f"{type(examples).__name__}({counted(len(examples), 'example')} of {classes}, {images})"
