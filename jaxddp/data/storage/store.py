"""Where encoded images lie, and what every such place can do."""

from typing import Protocol

import numpy as np

Fault = tuple[int, str]
"""A row, and what is wrong with its image, as a clause."""


class Store(Protocol):
    """A place of encoded images. A path names a file in it, and an offset the record in a file that holds many.

    The stream has ways of its own to read local and record files within TensorFlow's graph; from any other store it
    reads a batch at a time, in threads, so `read` must bear being called from several at once.
    """

    def name(self, path: bytes, offset: int = 0) -> str:
        """What a person calls the image, for messages."""
        ...

    def read(self, path: bytes, offset: int = 0) -> bytes:
        """The encoded image.

        Raises:
            InputError: it is not there, or cannot be read; names it.
            Unreachable: a store that is elsewhere gave no answer within its deadline.
        """
        ...

    def faults(self, paths: np.ndarray) -> list[Fault]:
        """The rows of bytes 'S'[N] whose image is seen to be missing or empty, in their order, without opening any."""
        ...
