"""Chooses which image is read in place of an image that cannot be used, in training and in predictions."""

import logging

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.data.example_set import Examples, labels_of

_log = logging.getLogger("jaxddp.data")


class Substitutes:
    """Replaces each image that cannot be used by the next usable one of the same class, or set of classes.

    A host knows the faults only of the images that it has read. Still, all hosts end with the same substitute: a host
    that reads a substitute and finds that it cannot be used takes the next image.
    """

    def __init__(self, examples: Examples):
        self._labels, self._name = labels_of(examples), examples.name
        self._codes = self._labels.codes
        self._refused: set[int] = set()

    def resolve(self, rows: np.ndarray) -> np.ndarray:
        """Return, for each of int[n] rows, the row whose image is read: a substitute if the row was refused."""
        if not self._refused:
            return rows
        return np.array([self._substitute(row) for row in rows.tolist()], rows.dtype)

    def refuse(self, row: int, fault: str) -> None:
        """Replace a row's image from now on, and logs the fault. Raises: InputError if no image can replace it."""
        self._refused.add(row)
        substitute = self._substitute(row)
        if substitute in self._refused:
            names = ", ".join(self._labels.names[label] for label in self._labels.of(row))
            raise InputError(f"{fault}; and no image{names and f' of class {names}'} is left to substitute")
        _log.warning("%s; its substitute is %s", fault, self._name(substitute))

    def _substitute(self, row: int) -> int:
        """Return the next row of the same class, cyclically, that was not refused; the row itself if none is left."""
        if row not in self._refused:
            return row
        codes = self._codes
        rows = np.flatnonzero(codes == codes[row])
        following = np.roll(rows, -int(np.searchsorted(rows, row))).tolist()
        return next((other for other in following if other not in self._refused), row)


class Omissions:
    """Collects the rows of a source that cannot be used, so predictions can go on without them.

    It is used in place of `Substitutes`. The first images of the source that were not refused are read in place
    of these rows, and `Batch.substituted` marks them.

    Attributes:
        faults: a dict from each row that cannot be used to a message.
    """

    def __init__(self, num_examples: int):
        self.faults: dict[int, str] = {}
        self._num_examples = num_examples

    @property
    def all(self) -> bool:
        """Whether no row can be used."""
        return len(self.faults) == self._num_examples

    def resolve(self, rows: np.ndarray) -> np.ndarray:
        """Return, for each of int[n] rows, the row whose image is read: a substitute if the row was refused."""
        refused = np.isin(rows, np.fromiter(self.faults, rows.dtype, len(self.faults)))
        if not refused.any():
            return rows
        left = np.setdiff1d(np.arange(self._num_examples, dtype=rows.dtype), list(self.faults))
        resolved = rows.copy()
        resolved[refused] = left[np.arange(refused.sum()) % len(left)]
        return resolved

    def refuse(self, row: int, fault: str) -> None:
        """Leave a row out from now on. Raises: InputError if no row is left."""
        self.faults[row] = fault
        if self.all:
            raise InputError(f"{fault}; and no image is left that can be used")
