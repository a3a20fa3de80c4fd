"""A process tells the launcher that started it when its work begins and ends.

A process that ends during its work with exit code 0, as by `os._exit(0)` in a user's code or a library, has failed. The
launcher cannot recognize this failure by the exit code.
"""

import contextlib
import functools
import os
import stat
from collections.abc import Iterator

from jaxddp.job.env_variables import FILE_DESCRIPTORS, lookup, number

STATUS_PIPE = "JAXDDP_STATUS_FD"
"""The environment variable that holds the number of the pipe's end to write to."""
_BEGIN, _END, _QUIT = b"+", b"-", b"!"
"""`_QUIT` means that the user's code ended the process, so a restarted process would end in the same way."""


@contextlib.contextmanager
def report_work() -> Iterator[None]:
    """Tell the launcher that this process works in the block. Blocks can be nested."""
    _write(_BEGIN)
    try:
        yield
    except (SystemExit, GeneratorExit):
        _write(_QUIT)
        raise
    finally:
        _write(_END)


def _write(status: bytes) -> None:
    if (pipe := _pipe()) is not None:
        # If the launcher is gone or does not read, the work goes on.
        with contextlib.suppress(OSError):
            os.write(pipe, status)


@functools.cache
def _pipe() -> int | None:
    found = lookup(os.environ, STATUS_PIPE)
    # A child of this process must not write to this pipe.
    os.environ.pop(STATUS_PIPE, None)
    if found is None:
        return None
    pipe = number(found, FILE_DESCRIPTORS)
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(pipe).st_mode):
            os.set_blocking(pipe, False)
            return pipe
    return None


class WorkStatus:
    """The launcher's end of the pipe.

    Attributes:
        has_quit: whether the user's code has ended the process.
    """

    def __init__(self, pipe: int):
        self._pipe: int | None = pipe
        self._depth, self.has_quit = 0, False

    @classmethod
    @contextlib.contextmanager
    def open(cls) -> "Iterator[tuple[WorkStatus, int]]":
        """Yield a status, and the end of its pipe that a process started in the block inherits."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        status = cls(reading)
        try:
            yield status, writing
        except BaseException:
            status.close()
            raise
        finally:
            os.close(writing)

    @property
    def is_working(self) -> bool:
        """Whether the process's work has begun and not ended."""
        return self._depth > 0

    def read(self) -> None:
        """Read what the process has written so far."""
        with contextlib.suppress(BlockingIOError):
            while self._pipe is not None and (data := os.read(self._pipe, 4096)):
                self._depth += data.count(_BEGIN) - data.count(_END)
                self.has_quit = self.has_quit or _QUIT in data

    def close(self) -> None:
        """Close the pipe."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
