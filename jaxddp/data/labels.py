"""Labels: of which classes each of N examples is, of one or of several."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted, show
from jaxddp.data.subset import balanced_rows, chosen_classes


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
