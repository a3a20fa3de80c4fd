"""Which image replaces one that cannot be used: a function of the source, the same on any number of hosts."""

import logging

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.data.examples import Examples, labels_of

_log = logging.getLogger("jaxddp.data")


class Substitutes:
    """Rows of some examples whose images cannot be used, and for each the next row of its class, or classes, whose can.

    A host knows only the rows that it has read, and still all hosts choose the same substitutes: if a substitute cannot
    be used either, reading it shows that, and the next one replaces it.
    """

    def __init__(self, examples: Examples):
        self._labels, self._name = labels_of(examples), examples.name
        self._codes = self._labels.codes
        self._refused: set[int] = set()

    def resolve(self, rows: np.ndarray) -> np.ndarray:
        """Whose image to read for each of int[n] rows: the row itself, unless it was refused."""
        if not self._refused:
            return rows
        return np.array([self._substitute(row) for row in rows.tolist()], rows.dtype)

    def refuse(self, row: int, fault: str) -> None:
        """Replaces a row's image from now on, and logs the fault. Raises `InputError` where no image can replace it."""
        self._refused.add(row)
        substitute = self._substitute(row)
        if substitute in self._refused:
            names = ", ".join(self._labels.names[label] for label in self._labels.of(row))
            raise InputError(f"{fault}; and no image{names and f' of class {names}'} is left to substitute")
        _log.warning("%s; its substitute is %s", fault, self._name(substitute))

    def _substitute(self, row: int) -> int:
        """The first row from this one on that was not refused; itself where every row of its class was."""
        if row not in self._refused:
            return row
        codes = self._codes
        rows = np.flatnonzero(codes == codes[row])
        following = np.roll(rows, -int(np.searchsorted(rows, row))).tolist()
        return next((other for other in following if other not in self._refused), row)
