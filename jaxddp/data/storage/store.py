"""Where encoded images are stored, and what every such store can do."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

Fault = tuple[int, str]
"""A row, and what is wrong with its image, as a clause."""


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

    def in_graph(self) -> Callable[[Any, Any], Any] | None:
        """TensorFlow ops from path and offset to the encoded image, which are faster than `read`.

        A string and an int64 scalar to a string scalar; None where threads have to fetch the images with `read`.
        """
        ...

    def faults(self, paths: np.ndarray) -> list[Fault]:
        """The rows of bytes 'S'[N] whose image is seen to be missing or empty, in their order, without opening any."""
        ...
