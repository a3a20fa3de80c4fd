"""Images that cannot be used and may be left out: where every example is to be answered, an error is its answer."""

import numpy as np

from jaxddp.core.errors import InputError


class Omissions:
    """The rows of a source that cannot be used, and why.

    It takes the place of `Substitutes`: other images are read for these rows, and a batch says for which. Which others
    decides nothing, so they are taken in turn: each time as many are tried as are missing.

    Attributes:
        faults: one line for each row that cannot be used.
    """

    def __init__(self, num_examples: int):
        self.faults: dict[int, str] = {}
        self._num_examples = num_examples

    @property
    def all(self) -> bool:
        """Whether no row is left."""
        return len(self.faults) == self._num_examples

    def resolve(self, rows: np.ndarray) -> np.ndarray:
        """Whose image to read for each of int[n] rows: the row itself, unless it was refused."""
        refused = np.isin(rows, np.fromiter(self.faults, rows.dtype, len(self.faults)))
        if not refused.any():
            return rows
        left = np.setdiff1d(np.arange(self._num_examples, dtype=rows.dtype), list(self.faults))
        resolved = rows.copy()
        resolved[refused] = left[np.arange(refused.sum()) % len(left)]
        return resolved

    def refuse(self, row: int, fault: str) -> None:
        """Leave a row out from now on. Raises: InputError; no row is left."""
        self.faults[row] = fault
        if self.all:
            raise InputError(f"{fault}; and no image is left that can be used")
