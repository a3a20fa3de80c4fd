"""Labels: the class or classes of each of N examples."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import counted, show
from jaxddp.data.selection.subset import balanced_rows, chosen_classes


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


@dataclass(frozen=True, eq=False)
class LabelSets:
    """The classes of N examples in a CSV file, at least one class for each example."""

    members: np.ndarray
    """object[N], tuples of one or more class indices, ascending."""
    file: str
    """The CSV file, for messages."""
    line: np.ndarray
    """int64[N], the line of each example in the CSV file."""

    def __repr__(self) -> str:
        return f"LabelSets({counted(len(self.members), 'example')}, {self.several.sum():,} of several classes)"

    @property
    def several(self) -> np.ndarray:
        """bool[N], whether an example has more than one class."""
        return np.array([len(classes) > 1 for classes in self.members], bool)

    @property
    def first(self) -> np.ndarray:
        """The first class of each example, int32[N]."""
        return np.array([classes[0] for classes in self.members], np.int32)

    @property
    def labels(self) -> np.ndarray:
        """int32[N], the class of each example that has one class; -1 for examples with several classes."""
        return np.where(self.several, np.int32(-1), self.first)

    def first_of(self, chosen: np.ndarray) -> np.ndarray:
        """Return the first class of each example among the chosen classes, int[n]: int32[N], -1 if there is none."""
        wanted = set(chosen.tolist())
        return np.array([next((one for one in classes if one in wanted), -1) for classes in self.members], np.int32)

    def rows(self, rows: np.ndarray) -> "LabelSets":
        """Return the classes of int[n] rows, in that order."""
        return replace(self, members=self.members[rows], line=self.line[rows])

    def select(self, chosen: np.ndarray) -> "LabelSets":
        """Return the sets with only the chosen classes.

        Args:
            chosen: int[n], ascending; these classes are renumbered to 0..n-1. Each example must have at least one.
        """
        dense = {label: place for place, label in enumerate(chosen.tolist())}
        members = [[dense[one] for one in classes if one in dense] for classes in self.members]
        return replace(self, members=as_members(members))

    def rows_of_classes(self, num_classes: int) -> np.ndarray:
        """Return multi-hot labels: uint8[N, K], 1 for each class of an example."""
        hot = np.zeros((len(self.members), num_classes), np.uint8)
        for row, members in enumerate(self.members):
            hot[row, list(members)] = 1
        return hot

    def check_single(self, class_names: tuple[str, ...]) -> None:
        """Raise `InputError`, with file and line, if an example has several classes."""
        several = np.flatnonzero(self.several)
        if len(several):
            names = ", ".join(class_names[label] for label in self.members[several[0]])
            raise InputError(
                f"{self.file}:{self.line[several[0]]}: several labels ({names}), but packing accepts one label per row "
                f"({len(several)} of {len(self.members)} rows have several)",
                advice=("keep one label per row, or set ", Key("data.classes"), " to classes of which no row has two"),
            )


def as_members(sets: list[list[int]]) -> np.ndarray:
    """Convert lists of class indices to the array `LabelSets.members`."""
    # From tuples of equal length, `np.array` would make a matrix.
    return np.fromiter((tuple(sorted(classes)) for classes in sets), object, len(sets))
