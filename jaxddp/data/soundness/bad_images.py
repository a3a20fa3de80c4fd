"""The choice of the images that replace unusable images, in training and in predictions."""

import logging

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.data.example_set import Examples, labels_of

_log = logging.getLogger("jaxddp.data")


class Substitutes:
    """Substitutes for unusable images: each is replaced by the next usable image of the same class or set of classes.

    Each host finds unusable images only among the images that it reads. If a substitute is unusable too, the host takes
    the next image, so all hosts arrive at the same substitute.
    """

    def __init__(self, examples: Examples):
        self._labels, self._name = labels_of(examples), examples.name
        self._codes = self._labels.codes
        self._unusable: set[int] = set()

    def resolve(self, rows: np.ndarray) -> np.ndarray:
        """Return int[n] rows with each unusable row replaced by the row of its substitute."""
        if not self._unusable:
            return rows
        return np.array([self._substitute(row) for row in rows.tolist()], rows.dtype)

    def refuse(self, row: int, fault: str) -> None:
        """Mark a row as unusable, and log its fault and substitute. Raises: InputError if there is no substitute."""
        self._unusable.add(row)
        substitute = self._substitute(row)
        if substitute in self._unusable:
            names = ", ".join(self._labels.names[label] for label in self._labels.of(row))
            raise InputError(f"{fault}; and no image{names and f' of class {names}'} is left to substitute")
        _log.warning("%s; its substitute is %s", fault, self._name(substitute))

    def _substitute(self, row: int) -> int:
        """Return the next usable row of the same class, cyclically; the row itself if there is none."""
        if row not in self._unusable:
            return row
        codes = self._codes
        rows = np.flatnonzero(codes == codes[row])
        following = np.roll(rows, -int(np.searchsorted(rows, row))).tolist()
        return next((other for other in following if other not in self._unusable), row)


class Omissions:
    """The unusable rows of a source, which predictions omit.

    It has the interface of `Substitutes`. In place of unusable images, the first usable images of the source are read,
    and `Batch.substituted` marks these examples.

    Attributes:
        faults: a dict from each unusable row to a message.
    """

    def __init__(self, num_examples: int):
        self.faults: dict[int, str] = {}
        self._num_examples = num_examples

    @property
    def omits_all(self) -> bool:
        """Whether all rows are unusable."""
        return len(self.faults) == self._num_examples

    def resolve(self, rows: np.ndarray) -> np.ndarray:
        """Return int[n] rows with each unusable row replaced by the row of its substitute."""
        unusable = np.isin(rows, np.fromiter(self.faults, rows.dtype, len(self.faults)))
        if not unusable.any():
            return rows
        left = np.setdiff1d(np.arange(self._num_examples, dtype=rows.dtype), list(self.faults))
        resolved = rows.copy()
        resolved[unusable] = left[np.arange(unusable.sum()) % len(left)]
        return resolved

    def refuse(self, row: int, fault: str) -> None:
        """Mark a row as unusable. Raises: InputError if no row is left."""
        self.faults[row] = fault
        if self.omits_all:
            raise InputError(f"{fault}; and no image is left that can be used")
