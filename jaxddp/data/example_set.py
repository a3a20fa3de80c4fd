"""What every set of examples says of itself, whatever its images are and however they come."""

from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxddp.core.wording import counted, some
from jaxddp.data.labels import Labels


class Record(NamedTuple):
    """What identifies an example, in JSON's types."""

    id: str | int
    """Its row, where it has no id."""
    path: str | None = None
    """The file in the data set that holds the image, where one does."""
    offset: int | None = None
    """Where in that file the image's record is; None where the file is the image."""


class Examples(Protocol):
    """N examples of K classes."""

    # Not a property: type checkers do not accept a cached property for one.
    fingerprint: Any
    """str, which differs where any example or class does."""

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
    def num_classes(self) -> int:
        """The number K of classes."""
        ...

    def __len__(self) -> int: ...

    @property
    def pixel_shape(self) -> tuple[int, int, int] | None:
        """(H, W, C) of each image, where they are kept as pixels; None where they are encoded files."""
        ...

    def name(self, row: int) -> str:
        """What a person calls a row's image."""
        ...


def id_of(examples: Examples, row: int) -> str:
    """The id of a row, of examples that have records; else its number."""
    record = getattr(examples, "record", Record)
    return str(record(row).id)


def labels_of(examples: Examples) -> Labels:
    """The labels of examples, with the classes that they are of."""
    return Labels(examples.labels, tuple(examples.class_ids), tuple(examples.class_names))


def in_a_line(examples: Examples, images: str) -> str:
    """Examples for people, their columns left out; `images` says what and where they are."""
    names = f" ({some(examples.class_names)})" if examples.num_classes else ""
    classes = f"{counted(examples.num_classes, 'class')}{names}"
    return f"{type(examples).__name__}({counted(len(examples), 'example')} of {classes}, {images})"
