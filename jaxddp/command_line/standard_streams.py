"""Makes the standard streams of a command usable if they are closed, full, or of a small character set."""

import io
import os
import re
import shutil
import sys
from typing import Any

from jaxddp.core.errors import JaxddpError

_SIZE = re.compile(r"[1-9][0-9]{0,3}")
_NARROWEST = 10


class OutputError(JaxddpError):
    """Standard output cannot be written: the program that reads it has ended, or the disk is full."""


def make_usable(*, needs_output: bool) -> None:
    """Replace the standard streams. Streams that a notebook or a test has replaced do not change.

    A stream that was closed before the start, as daemons close them, is opened as /dev/null. A character that the
    encoding lacks is escaped. If standard error cannot be written, its text is discarded.

    Args:
        needs_output: whether a failed write to standard output raises `OutputError`; otherwise its text is discarded.
    """
    # A file that is opened later would get the number of a closed stream, and the output of C++ code would go into it.
    # The system returns the lowest free number.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is sys.__stdout__:
        sys.stdout = sys.__stdout__ = _replaced(sys.stdout, 1, raises=needs_output)
    if sys.stderr is sys.__stderr__:
        sys.stderr = sys.__stderr__ = _replaced(sys.stderr, 2, raises=False)
    # For other values of these variables, rich raises an error or prints nothing.
    for name in ("COLUMNS", "LINES"):
        if not _SIZE.fullmatch(os.environ.get(name, "")):
            os.environ.pop(name, None)
    # In fewer columns, tyro does not end.
    if shutil.get_terminal_size().columns < _NARROWEST:
        os.environ["COLUMNS"] = str(_NARROWEST)


class _Writer(io.FileIO):
    """A file descriptor that becomes /dev/null after a failed write."""

    def __init__(self, number: int, *, raises: bool):
        super().__init__(number, "wb", closefd=False)
        self._raises = raises

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self._raises:
                raise OutputError(f"standard output cannot be written ({error.strerror})") from None
            return len(data)


def _replaced(stream: Any, number: int, *, raises: bool) -> io.TextIOWrapper:
    raw = _Writer(number, raises=raises)
    if stream is None:
        return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
    # As in Python itself, a stream that is written at once has no buffer.
    buffer = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
