"""`Store`, the protocol of places that hold encoded images."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Fault = tuple[int, str]
"""A row, and a clause that describes the fault of its image."""


class Store(Protocol):
    """A store of encoded images. A path identifies a file; an offset identifies an image in a file of many images."""

    @property
    def root(self) -> Path | None:
        """The directory of the store's files; None if a file cannot be identified without reading it."""
        ...

    def name(self, path: bytes, offset: int = 0) -> str:
        """Return a readable name of the image, for messages."""
        ...

    def read(self, path: bytes, offset: int = 0) -> bytes:
        """Return the encoded image. Several threads may call this at the same time.

        Raises:
            InputError: the image is missing, or cannot be read; the message names it.
            Unreachable: a remote store did not answer within its deadline.
        """
        ...

    def in_graph(self) -> Callable[[Any, Any], Any] | None:
        """Return a function of TensorFlow ops that reads an image faster than `read`; None if threads must call `read`.

        The function takes a file below the `root`, a string scalar, and an offset, an int64 scalar, and returns the
        encoded image, a string scalar. Stores that read in the same way return the same function, so a graph
        with the function is traced only once.
        """
        ...

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        """Return the rows of `paths`, bytes 'S'[N], whose image is missing or empty, ascending. No image is opened.

        A store with a `root` writes to `identity`, uint64[N], a number other than 0 that depends on a file's path below
        the root, its size, and its times of change.
        """
        ...


def faults_by_folder(
    paths: np.ndarray, find_faults: Callable[[bytes, dict[bytes, int]], Iterable[Fault]], threads: int
) -> list[Fault]:
    """Return the faults that `find_faults` finds in each folder of `paths`, bytes 'S'[N], all different.

    Args:
        find_faults: a function of a folder and a dict from its file names to rows; it returns faults.
    """
    folders: dict[bytes, dict[bytes, int]] = defaultdict(dict)
    for row, path in enumerate(paths.tolist()):
        folder, _, name = path.rpartition(b"/")
        folders[folder][name] = row
    with ThreadPoolExecutor(threads) as pool:
        return sorted(
            fault for faults in pool.map(lambda item: list(find_faults(*item)), folders.items()) for fault in faults
        )
