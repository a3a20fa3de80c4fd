"""What a worker says of its work, as the launcher reads it; see `jaxddp.job.at_work`."""

import contextlib
import os
from collections.abc import Iterator

from jaxddp.job.at_work import BEGUN, ENDED, QUIT


class Words:
    """The launcher's end of a pipe.

    Attributes:
        quit: whether the user's code was said to have ended the process.
    """

    def __init__(self, reading: int):
        self._reading: int | None = reading
        self._begun, self.quit = 0, False

    @classmethod
    @contextlib.contextmanager
    def pipe(cls) -> "Iterator[tuple[Words, int]]":
        """The words of a worker that is started in the block, and the end of the pipe that it is given."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        words = cls(reading)
        try:
            yield words, writing
        except BaseException:
            words.close()
            raise
        finally:
            os.close(writing)

    @property
    def at_work(self) -> bool:
        """Whether its last work has not ended."""
        return self._begun > 0

    def read(self) -> None:
        """Take what was said so far."""
        with contextlib.suppress(BlockingIOError):
            while self._reading is not None and (said := os.read(self._reading, 4096)):
                self._begun += said.count(BEGUN) - said.count(ENDED)
                self.quit = self.quit or QUIT in said

    def close(self) -> None:
        """What is said from here on is not read."""
        if self._reading is not None:
            os.close(self._reading)
            self._reading = None
