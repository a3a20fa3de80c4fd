"""Reports the begin and the end of a process's work to the launcher that started the process.

A process that ends with exit code 0 during its work has failed: a user's code or a library called `os._exit(0)`. The
launcher cannot recognize this failure by the exit code.
"""

import contextlib
import functools
import os
import stat
from collections.abc import Iterator

from jaxddp.core.phases import working
from jaxddp.job.env_variables import FILE_DESCRIPTORS, lookup, number

STATUS_PIPE = "JAXDDP_STATUS_FD"
"""The environment variable with the file descriptor of the writable end of the pipe."""
_BEGIN, _END, _QUIT = b"+", b"-", b"!"
"""`_QUIT` means that the user's code ended the process, so a restarted process would end in the same way."""


@contextlib.contextmanager
def report_work() -> Iterator[None]:
    """Report to the launcher that this process works during the block, and measure its time. Blocks can be nested."""
    _write(_BEGIN)
    try:
        with working():
            yield
    except (SystemExit, GeneratorExit):
        _write(_QUIT)
        raise
    finally:
        _write(_END)


def _write(status: bytes) -> None:
    if (pipe := _pipe()) is not None:
        # The work continues if the launcher is gone or does not read.
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
    """The status of a process, which the launcher reads from a pipe.

    Attributes:
        has_quit: whether the user's code ended the process, for example by `sys.exit`.
    """

    def __init__(self, pipe: int):
        self._pipe: int | None = pipe
        self._depth, self.has_quit = 0, False

    @classmethod
    @contextlib.contextmanager
    def open(cls) -> "Iterator[tuple[WorkStatus, int]]":
        """Yield a status, and the writable end of its pipe, for a process that is started in the block."""
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
        """Whether the process is working."""
        return self._depth > 0

    def read(self) -> None:
        """Read the reports that the process has written so far."""
        with contextlib.suppress(BlockingIOError):
            while self._pipe is not None and (data := os.read(self._pipe, 4096)):
                self._depth += data.count(_BEGIN) - data.count(_END)
                self.has_quit = self.has_quit or _QUIT in data

    def close(self) -> None:
        """Close the pipe."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
