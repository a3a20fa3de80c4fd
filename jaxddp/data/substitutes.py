"""Which image replaces one that cannot be used: a function of the source, the same on any number of hosts."""

import logging

import numpy as np

from jaxddp.data.source import Source
from jaxddp.errors import InputError

_log = logging.getLogger("jaxddp.data")


class Substitutes:
    """Rows of a source whose images cannot be used, and for each the next row of its class whose image can.

    A host knows only the rows that it has read, and still all hosts choose the same substitutes: if a substitute cannot
    be used either, reading it shows that, and the next one replaces it.
    """

    def __init__(self, source: Source):
        self._source = source
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
            label = self._source.labels[row]
            of_class = f" of class {self._source.class_names[label]}" if label >= 0 else ""
            raise InputError(f"{fault}; and no image{of_class} is left to substitute")
        _log.warning("%s; its substitute is %s", fault, self._source.name(substitute))

    def _substitute(self, row: int) -> int:
        """The first row from this one on that was not refused; itself where every row of its class was."""
        if row not in self._refused:
            return row
        rows = np.flatnonzero(self._source.labels == self._source.labels[row])
        following = np.roll(rows, -int(np.searchsorted(rows, row))).tolist()
        return next((other for other in following if other not in self._refused), row)
