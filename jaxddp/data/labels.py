"""Labels: of which classes each of N examples is, of one or of several."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.wording import counted, show
from jaxddp.data.selection.subset import balanced_rows, chosen_classes


@dataclass(frozen=True)
class LabelKind:
    """What losses and metrics know of labels: there are K classes, and an example is of one, or of any number."""

    num_classes: int
    several: bool = False
    """Whether an example may have several labels, or none."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Of which of K classes each of N examples is.

    Attributes:
        values: int32[N], class indices 0..K-1; -1 where the class is unknown. Where an example may have several labels,
            or none, uint8[N, K], 1 for each of its classes.
        ids: K ids, by which data sets are compared.
        names: K names for people.
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
        """How many examples of each class there are, int64[K]; one of several classes counts for each."""
        if self.several:
            return self.values.sum(0, dtype=np.int64)
        return np.bincount(self.values[self.values >= 0], minlength=len(self.ids))

    @property
    def single(self) -> np.ndarray:
        """int32[N], the class of an example that is of one alone; -1 for all others."""
        if not self.several:
            return self.values
        return np.where(self.values.sum(1) == 1, self.values.argmax(1), -1).astype(np.int32)

    @property
    def codes(self) -> np.ndarray:
        """int[N], the same for examples of the same class, or set of classes."""
        return np.unique(self.values, axis=0, return_inverse=True)[1].reshape(-1) if self.several else self.values

    def of(self, row: int) -> np.ndarray:
        """The classes of a row, int64[n], ascending; none where they are unknown."""
        return np.flatnonzero(self.values[row] if self.several else np.arange(len(self.ids)) == self.values[row])

    def share(self, limit: int) -> np.ndarray:
        """The rows of at most `limit` examples (from 1), int64[n], of each class its share; see `balanced_rows`."""
        return balanced_rows(self.codes, limit)

    def select(self, classes: str | Iterable[int | str], first: str) -> "tuple[np.ndarray, np.ndarray, Labels]":
        """The examples of some classes: int64[k], which classes, in the order of `ids` however they are written;
        int64[n], the rows of the examples, in their order; and the labels of these, made dense.

        Args:
            first: what a person calls the first example.

        Raises `InputError` as `chosen_classes`, or where no example is of these classes.
        """
        chosen = chosen_classes(classes, self.ids)
        if self.several:
            values = self.values[:, chosen]
            rows = np.flatnonzero(values.any(1))
        else:
            # One more slot than classes: it is where an unknown label, -1, looks itself up.
            dense = np.full(len(self.ids) + 1, -1, np.int32)
            dense[chosen] = np.arange(len(chosen))
            values = dense[self.values]
            rows = np.flatnonzero(values >= 0)
        if not len(rows):
            raise InputError(
                f"classes {show(classes)}: none of {counted(len(self.values), 'example')}, the first of which is "
                f"{first}, is of the {len(chosen)} selected; select other classes"
            )
        ids, names = (tuple(all_of[label] for label in chosen) for all_of in (self.ids, self.names))
        return chosen, rows, Labels(values[rows], ids, names)


@dataclass(frozen=True, eq=False)
class LabelSets:
    """The classes of each of N examples."""

    members: np.ndarray
    """object[N], of tuples of class indices, ascending; none is empty."""
    file: str
    """Where they are listed, for messages."""
    line: np.ndarray
    """int64[N], the line of the file of each example."""

    def __repr__(self) -> str:
        return f"LabelSets({counted(len(self.members), 'example')}, {self.several.sum():,} of several classes)"

    @property
    def several(self) -> np.ndarray:
        """Which examples are of more than one class, bool[N]."""
        return np.array([len(classes) > 1 for classes in self.members], bool)

    @property
    def first(self) -> np.ndarray:
        """The first class of each example, int32[N]."""
        return np.array([classes[0] for classes in self.members], np.int32)

    @property
    def labels(self) -> np.ndarray:
        """int32[N], the class of an example that has only one; -1 where it has several."""
        return np.where(self.several, np.int32(-1), self.first)

    def first_of(self, chosen: np.ndarray) -> np.ndarray:
        """The first class of each example that is among int[n] chosen ones, int32[N]; -1 where none is."""
        wanted = set(chosen.tolist())
        return np.array([next((one for one in own if one in wanted), -1) for own in self.members], np.int32)

    def rows(self, rows: np.ndarray) -> "LabelSets":
        """Those of int[n] rows, in that order."""
        return replace(self, members=self.members[rows], line=self.line[rows])

    def select(self, chosen: np.ndarray) -> "LabelSets":
        """With int[n] chosen classes alone, ascending, made dense; each example has one of them."""
        dense = {label: place for place, label in enumerate(chosen.tolist())}
        return replace(self, members=as_members([[dense[one] for one in own if one in dense] for own in self.members]))

    def rows_of_classes(self, num_classes: int) -> np.ndarray:
        """uint8[N, K], 1 for each class of an example."""
        hot = np.zeros((len(self.members), num_classes), np.uint8)
        for row, members in enumerate(self.members):
            hot[row, list(members)] = 1
        return hot

    def check_single(self, class_names: tuple[str, ...]) -> None:
        """Raises `InputError` where an example is of several classes; names file and line."""
        several = np.flatnonzero(self.several)
        if len(several):
            names = ", ".join(class_names[label] for label in self.members[several[0]])
            raise InputError(
                f"{self.file}:{self.line[several[0]]}: several labels ({names}), and packing takes one a row "
                f"({len(several)} of {len(self.members)} rows have several)",
                advice=("leave one in each, or set ", Key("data.classes"), " to some that no row shares"),
            )


def as_members(sets: list[list[int]]) -> np.ndarray:
    """Lists of class indices as `LabelSets.members`."""
    # NumPy would take tuples of one length for rows of a matrix.
    return np.fromiter((tuple(sorted(own)) for own in sets), object, len(sets))
