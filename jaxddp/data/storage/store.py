"""Where encoded images are stored, and what every such store can do."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Fault = tuple[int, str]
"""A row, and what is wrong with its image, as a clause."""


class Store(Protocol):
    """A store of encoded images. A path names a file in it, and an offset the record in a file that holds many."""

    @property
    def root(self) -> Path | None:
        """The directory of its files; None where they cannot be told apart without reading them."""
        ...

    def name(self, path: bytes, offset: int = 0) -> str:
        """What a person calls the image, for messages."""
        ...

    def read(self, path: bytes, offset: int = 0) -> bytes:
        """The encoded image. Several threads may call this at once.

        Raises:
            InputError: it is missing, or cannot be read; names it.
            Unreachable: a remote store gave no answer within its deadline.
        """
        ...

    def in_graph(self) -> Callable[[Any, Any], Any] | None:
        """TensorFlow ops from a file below the `root` and an offset to the encoded image, faster than `read`.

        A string and an int64 scalar to a string scalar; None where threads have to fetch the images with `read`. Stores
        that read alike have the same function: a graph that calls it is traced once.
        """
        ...

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        """The rows of bytes 'S'[N] whose image is seen to be missing or empty, in their order, without opening any.

        A store with a `root` writes to `identity`, uint64[N], a number that is another one where a file's path below
        the root, its size, or its time of change is; not 0.
        """
        ...


def faults_by_folder(
    paths: np.ndarray, look: Callable[[bytes, dict[bytes, int]], Iterable[Fault]], threads: int
) -> list[Fault]:
    """What `look` finds in each folder of bytes 'S'[N], no two of them equal; it is given the rows by name of file."""
    folders: dict[bytes, dict[bytes, int]] = defaultdict(dict)
    for row, path in enumerate(paths.tolist()):
        folder, _, name = path.rpartition(b"/")
        folders[folder][name] = row
    with ThreadPoolExecutor(threads) as pool:
        return sorted(fault for found in pool.map(lambda item: list(look(*item)), folders.items()) for fault in found)
