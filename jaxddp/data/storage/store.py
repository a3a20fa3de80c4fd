"""Where encoded images are stored, and what every such store can do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Fault = tuple[int, str]
"""A row, and what is wrong with its image, as a clause."""


@dataclass(frozen=True)
class InGraph:
    """How TensorFlow's graph reads a store's images by itself, which is faster than reading them in Python."""

    names: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, ...]]
    """From paths, bytes 'S'[n], and offsets, int64[n], to arrays of n values each, which name the images."""
    read: Callable[..., Any]
    """TensorFlow ops from one value of each array to the encoded image, a string scalar."""


class Store(Protocol):
    """A store of encoded images. A path names a file in it, and an offset the record in a file that holds many."""

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

    def in_graph(self) -> InGraph | None:
        """How TensorFlow reads the images; None where threads have to fetch them with `read`."""
        ...

    def faults(self, paths: np.ndarray) -> list[Fault]:
        """The rows of bytes 'S'[N] whose image is seen to be missing or empty, in their order, without opening any."""
        ...
