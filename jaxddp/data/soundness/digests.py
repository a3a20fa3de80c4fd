"""The SHA-256 that each image of a table is to have."""

import hashlib
from dataclasses import dataclass

import numpy as np

_SHOWN = 12
"""Hex digits of a digest in a message."""


@dataclass(frozen=True, eq=False)
class Digests:
    """What a manifest says of the files of N rows.

    Attributes:
        manifest: its file, for messages.
        sha256: void 'V32'[N]; zeros where the manifest does not list the row.
    """

    manifest: str
    sha256: np.ndarray

    @property
    def unlisted(self) -> np.ndarray:
        """int64[n], the rows that the manifest does not list."""
        return np.flatnonzero(self.sha256 == np.void(bytes(32)))

    def rows(self, rows: np.ndarray) -> "Digests":
        """Those of int[n] rows, in that order."""
        return Digests(self.manifest, self.sha256[rows])

    def of(self, rows: np.ndarray) -> np.ndarray:
        """bytes[n], 32 each, of int[n] rows."""
        # As 'S32' they would lose the zeros at their ends.
        return np.array(self.sha256[rows].tolist(), object)

    def fault(self, row: int, data: bytes) -> str | None:
        """What is wrong with a row's file, as a clause; None where nothing is."""
        wanted, found = self.sha256[row].tobytes(), hashlib.sha256(data).digest()
        if found == wanted:
            return None
        if not any(wanted):
            return f"{self.manifest} does not list it; run `jaxddp data check` again"
        there = f"{wanted.hex()[:_SHOWN]}… in {self.manifest}"
        advice = "put the file back, or run `jaxddp data check` again where it was meant to change"
        return f"its SHA-256 is {found.hex()[:_SHOWN]}…, and {there}; {advice}"
