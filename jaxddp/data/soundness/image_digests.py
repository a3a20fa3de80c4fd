"""`Digests`: the expected SHA-256 of each image of a table."""

import hashlib
from dataclasses import dataclass

import numpy as np

_SHOWN = 12
"""The number of hex digits of a digest in a message."""


@dataclass(frozen=True, eq=False)
class Digests:
    """The checksums in a manifest of the files of N rows.

    Attributes:
        manifest: the path of the manifest, for messages.
        sha256: void 'V32'[N]; zeros for a row that is not in the manifest.
    """

    manifest: str
    sha256: np.ndarray

    @property
    def unlisted(self) -> np.ndarray:
        """The rows that are not in the manifest, int64[n]."""
        return np.flatnonzero(self.sha256 == np.void(bytes(32)))

    def rows(self, rows: np.ndarray) -> "Digests":
        """Return the digests of int[n] rows, in that order."""
        return Digests(self.manifest, self.sha256[rows])

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the digests of int[n] rows as an object array of n bytes strings, 32 bytes each."""
        # The dtype 'S32' would drop trailing zeros.
        return np.array(self.sha256[rows].tolist(), object)

    def fault(self, row: int, data: bytes) -> str | None:
        """Return a message about the difference between a row's file and the manifest; None if they agree."""
        expected, actual = self.sha256[row].tobytes(), hashlib.sha256(data).digest()
        if actual == expected:
            return None
        if not any(expected):
            return f"{self.manifest} does not list it; run `jaxddp data check` again"
        listed = f"{expected.hex()[:_SHOWN]}… in {self.manifest}"
        advice = "put the file back, or run `jaxddp data check` again if the change is intended"
        return f"its SHA-256 is {actual.hex()[:_SHOWN]}…, and {listed}; {advice}"
