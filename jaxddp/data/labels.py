"""Labelled examples: their protocol, the class or classes of each of N examples, and the selection of classes."""

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxddp.core.errors import InputError, counted, nearest, show, some

ClassSelection = str | Iterable[int | str] | None
"""`"0:200"` (start and stop, as in Python), `"n01440764,n01443537"`, a sequence of indices or ids, or None for all."""
_RANGE = re.compile(r"\s*(-?[0-9]{1,9})\s*:\s*(-?[0-9]{1,9})\s*")
_FORMS = "give a range such as '0:200', or class ids such as 'n01440764,n01443537'"
_TAKE_KEY = 0x7A6B65


@dataclass(frozen=True)
class LabelKind:
    """The kind of labels, for losses and metrics: the number of classes, single-label or multi-label."""

    num_classes: int
    several: bool = False
    """Whether an example may have several labels, or none."""


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of N examples of K classes.

    Attributes:
        values: int32[N], class indices 0..K-1; -1 if the class is unknown. Multi-hot uint8[N, K] if examples may have
            several labels or none.
        ids: the ids of the K classes, by which data sets are compared.
        names: the readable names of the K classes.
    """

    values: np.ndarray
    ids: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def kind(self) -> LabelKind:
        return LabelKind(len(self.ids), self.several)

    @property
    def several(self) -> bool:
        """Whether an example may have several labels, or none."""
        return self.values.ndim == 2

    @property
    def counts(self) -> np.ndarray:
        """The number of examples of each class, int64[K]; an example of several classes counts once in each."""
        if self.several:
            return self.values.sum(0, dtype=np.int64)
        return np.bincount(self.values[self.values >= 0], minlength=len(self.ids))

    @property
    def single(self) -> np.ndarray:
        """int32[N], the class of each example that has exactly one class; -1 for all other examples."""
        if not self.several:
            return self.values
        return np.where(self.values.sum(1) == 1, self.values.argmax(1), -1).astype(np.int32)

    @property
    def codes(self) -> np.ndarray:
        """int[N], the class index of each example; for multi-hot labels, a number of its set of classes."""
        return np.unique(self.values, axis=0, return_inverse=True)[1].reshape(-1) if self.several else self.values

    def of(self, row: int) -> np.ndarray:
        """Return the classes of a row, int64[n], ascending; empty if the class is unknown."""
        return np.flatnonzero(self.values[row] if self.several else np.arange(len(self.ids)) == self.values[row])

    def share(self, limit: int) -> np.ndarray:
        """Return the rows of at most `limit` examples, int64[n], in proportion to the classes; see `balanced_rows`."""
        return balanced_rows(self.codes, limit)

    def select(self, classes: str | Iterable[int | str], first: str) -> "tuple[np.ndarray, np.ndarray, Labels]":
        """Select the examples of some classes.

        Args:
            first: a readable name of the first example, for messages.

        Returns:
            The indices of the chosen classes, int64[k], in the order of `ids`; the rows of their examples, int64[n],
            ascending; and the labels of these rows, with indices 0..k-1.

        Raises:
            InputError: `chosen_classes` rejects the classes, or no example is of these classes.
        """
        chosen = chosen_classes(classes, self.ids)
        if self.several:
            values = self.values[:, chosen]
            rows = np.flatnonzero(values.any(1))
        else:
            # An unknown label, -1, indexes the additional last element.
            dense = np.full(len(self.ids) + 1, -1, np.int32)
            dense[chosen] = np.arange(len(chosen))
            values = dense[self.values]
            rows = np.flatnonzero(values >= 0)
        if not len(rows):
            raise InputError(
                f"classes {show(classes)}: no example has one of the {len(chosen)} selected classes "
                f"({counted(len(self.values), 'example')}, the first is {first}); select other classes"
            )
        ids, names = (tuple(all_of[label] for label in chosen) for all_of in (self.ids, self.names))
        return chosen, rows, Labels(values[rows], ids, names)


def chosen_classes(classes: str | Iterable[int | str], class_ids: Sequence[str]) -> np.ndarray:
    """Return the indices of the chosen classes, int64[K], in ascending order.

    Raises:
        InputError: a class id is unknown, an index is out of bounds, a class is chosen twice, or no class is chosen.
    """
    where = f"classes {show(classes)}"
    position = {class_id: index for index, class_id in enumerate(class_ids)}
    items = classes
    if isinstance(classes, str):
        span = _RANGE.fullmatch(classes)
        items = range(int(span[1]), int(span[2])) if span else filter(None, map(str.strip, classes.split(",")))
    elif not isinstance(classes, Iterable):
        raise InputError(f"{where}: is of type {type(classes).__name__}; {_FORMS}")
    indices: list[int] = []
    for item in items:
        try:
            index = position.get(item, -1) if isinstance(item, str) else operator.index(item)
        except TypeError:
            raise InputError(f"{where}: {show(item)} is neither an index nor a class id; {_FORMS}") from None
        # The first index that is wrong ends a range of a billion classes.
        if not 0 <= index < len(class_ids):
            if isinstance(item, str):
                hint = nearest(item, position)
                raise InputError(f"{where}: unknown class {show(item)} of {len(position)}{hint or f'; {_FORMS}'}")
            count = len(class_ids)
            raise InputError(f"{where}: out of bounds, there are {count} classes; stay within 0:{count}")
        indices.append(index)
    if not indices:
        raise InputError(f"{where}: selects no class; {_FORMS}")
    chosen, counts = np.unique(np.array(indices, np.int64), return_counts=True)
    if counts.max() > 1:
        raise InputError(f"{where}: names {class_ids[chosen[counts.argmax()]]} twice; name each class once")
    return chosen


def balanced_rows(label: np.ndarray, limit: int) -> np.ndarray:
    """Return `limit` of N rows, int64, ascending, in proportion to the classes; all rows if N is at most `limit`.

    The choice depends only on the labels and the limit. The rows of a smaller limit are a subset of those of a larger
    limit. The m rows of a class, in a fixed pseudo-random order, get the ranks 1/2m, 3/2m, 5/2m, ...; the rows with the
    smallest ranks are chosen (Webster's method of apportionment).

    Raises: InputError if the limit is below 1.
    """
    if limit < 1:
        raise InputError(f"limit {limit}: selects no example; give a limit of 1 or more")
    if limit >= len(label):
        return np.arange(len(label))
    # The raw words of a counter-based generator are fixed; NumPy's permutations may change from release to release.
    word = np.random.Philox(key=_TAKE_KEY).random_raw(len(label))
    by_class = np.lexsort((word, label))
    _, start, count = np.unique(label[by_class], return_index=True, return_counts=True)
    rank = np.arange(len(label)) - np.repeat(start, count)
    place = (rank + 0.5) / np.repeat(count, count)
    return np.sort(by_class[np.lexsort((word[by_class], place))[:limit]])


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
