"""The output of a command: standard streams that are closed or full, a line about its activity, and tables."""

import contextlib
import io
import os
import re
import select
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxddp.core.errors import JaxddpError, on_screen
from jaxddp.core.phases import Activity

if TYPE_CHECKING:
    from rich.console import Console

TableRow = Sequence[str | tuple[str, str]]
"""A row of cells. A cell is a text, or a text with a style of rich."""
IMPORTING = "importing JAX"
"""The first status of a command. The import takes seconds."""
_WIDTH_OF_FILE = 10_000
"""The console's width in characters for output to a file or a pipe. It is larger than any row."""
SECONDS_OF_LINES = (10.0, 30.0)
"""In a file or a pipe, seconds until the second line of an activity, and between further lines."""
_BAR, _BAR_AND_WORDS = 20, 60
"""The number of characters of a bar, and the width of a terminal from which on the line has one."""
_SIZE, _NUMBER = re.compile(r"[1-9][0-9]{0,3}"), re.compile(r"-?(?:[0-9]|$)")
"""A size of a terminal in characters, and the beginning of a cell that holds a number or nothing."""
_NARROWEST = 10


def print_table(columns: Sequence[str], rows: Iterable[TableRow]) -> None:
    """Print a table on standard output, with the width of the terminal or COLUMNS; one line a row in a file or a pipe.

    Columns of numbers are aligned on the right. If the table is too wide, cells are folded, or if their longest words
    are too wide, each cell gets its own line.
    """
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH_OF_FILE)
    table = Table(box=box.SIMPLE)
    parts = [[(cell,) if isinstance(cell, str) else cell for cell in row] for row in rows]
    cells = [[Text(on_screen(words), *style) for words, *style in row] for row in parts]
    for place, title in enumerate(columns):
        is_number = all(_NUMBER.match(row[place].plain) for row in cells)
        table.add_column(title, overflow="fold", justify="right" if is_number else "left")
    for row in cells:
        table.add_row(*row)
    if Measurement.get(console, console.options.update(width=_WIDTH_OF_FILE), table).minimum <= console.width:
        console.print(table)
        return
    for row in cells:
        named = [Text.assemble(f"{title}: " if title else "", text) for title, text in zip(columns, row, strict=True)]
        lines = [named[0], *(Text("  ") + text for text, cell in zip(named[1:], row[1:], strict=True) if cell.plain)]
        console.print(Text("\n").join(lines), overflow="fold")


class StatusLine:
    """A line on standard error with the current activity. On a terminal, it is erased after the activity.

    In a file or a pipe, an activity is printed at once, and with its progress after 10 s and then every 30 s.
    """

    def __init__(self) -> None:
        self._is_drawn = False
        self._last = Activity()
        self._next_seconds = SECONDS_OF_LINES[0]

    def show(self, activity: Activity) -> None:
        """Show an activity."""
        with contextlib.suppress(OSError, ValueError):  # Standard error may be closed.
            if not (sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb")):
                self._print(activity)
                return
            from rich.console import Console
            from rich.text import Text

            self.clear()
            console, self._is_drawn = Console(stderr=True, highlight=False), True
            bar = _bar(activity, console) if console.width >= _BAR_AND_WORDS else ""
            line = Text(on_screen(f"{activity.description} ... {bar}{activity.details()}"), "dim")
            # The next output begins at the left margin and overwrites the line.
            console.print(line, end="\r", no_wrap=True, overflow="ellipsis")

    def clear(self) -> None:
        """Erase the line if it is visible."""
        if self._is_drawn:
            with contextlib.suppress(OSError, ValueError):
                print(end="\r\x1b[2K", file=sys.stderr, flush=True)
        self._is_drawn = False

    def _print(self, activity: Activity) -> None:
        seconds, words, last, self._last = activity.seconds, f"{activity.description} ...", self._last, activity
        if activity.began != last.began:
            self._next_seconds = SECONDS_OF_LINES[0]
        if seconds >= self._next_seconds:
            self._next_seconds = seconds + SECONDS_OF_LINES[1]
            words = f"{words} {activity.details()}"
        elif activity.description == last.description:
            return
        print(on_screen(words), file=sys.stderr, flush=True)


def _bar(activity: Activity, console: "Console") -> str:
    """Return a bar for the completed share; "" if it is unknown."""
    if activity.share is None:
        return ""
    done, left = ("#", "-") if console.options.ascii_only else ("━", "─")
    filled = int(_BAR * activity.share)
    return f"{done * filled}{left * (_BAR - filled)} "


class OutputError(JaxddpError):
    """Standard output cannot be written: the program that reads it has ended, or the disk is full."""


def make_usable(*, needs_output: bool) -> None:
    """Replace the standard streams, except those that a notebook or a test has replaced.

    A stream that was closed before the start, as daemons close them, is opened as /dev/null. A character that the
    encoding lacks is escaped. Text that cannot be written is discarded, or raises `OutputError` if it `needs_output`.
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
            # A stream that another program has set to non-blocking takes a part, or nothing.
            start = 0
            while start < len(data):
                select.select([], [self], [])
                start += super().write(data[start:]) or 0
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
    # After Ctrl-C during a write, a `BufferedWriter` would write its content again.
    ends = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    return io.TextIOWrapper(raw, stream.encoding, "backslashreplace", **ends)
