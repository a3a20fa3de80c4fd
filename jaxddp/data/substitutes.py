"""Which image stands in for one that cannot be used: a function of the table, the same on any number of hosts."""

import logging
from functools import cached_property

import numpy as np

from jaxddp.data.table import ExampleTable
from jaxddp.errors import InputError

_log = logging.getLogger("jaxddp.data")


class Substitutes:
    """Rows of a table whose images cannot be used, and for each the next row of its class whose image can.

    A host knows only the rows that it has met, and yet all choose alike: if a stand-in cannot be used either, that is
    found out when it is read, and the one after it takes its place.
    """

    def __init__(self, table: ExampleTable):
        self._table = table
        self._refused: set[int] = set()

    def resolve(self, rows: np.ndarray) -> np.ndarray:
        """Whose image to read for each of int[n] rows: the row itself, unless it was refused."""
        if not self._refused:
            return rows
        return np.array([self._stand_in(row) for row in rows.tolist()], rows.dtype)

    def refuse(self, row: int, fault: str) -> None:
        """From now on another image stands in for a row's. The log gets the fault, once a row.

        Raises:
            InputError: no image of the class is left.
        """
        self._refused.add(row)
        stand_in = self._stand_in(row)
        if stand_in in self._refused:
            name = self._table.class_names[self._table.label[row]]
            raise InputError(f"{fault}; and no image of class {name} is left that could stand in for it")
        _log.warning("%s: %s stands in for it", fault, self._table.name(stand_in))

    def _stand_in(self, row: int) -> int:
        """The first row from this one on that was not refused; itself where every row of its class was."""
        candidate = row
        while candidate in self._refused:
            candidate = int(self._following[candidate])
            if candidate == row:
                break
        return candidate

    @cached_property
    def _following(self) -> np.ndarray:
        """Each row's next row of the same class, the first one after the last: int64[N]."""
        by_class = np.argsort(self._table.label, kind="stable")
        following = np.empty_like(by_class)
        following[by_class] = np.roll(by_class, -1)
        first = np.flatnonzero(np.diff(self._table.label[by_class], prepend=-2))
        following[by_class[np.append(first[1:], len(by_class)) - 1]] = by_class[first]
        return following
