"""What a person sees at the terminal beside plain lines: tables, and what takes longer."""

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jaxddp.core.wording import on_screen

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Row = Sequence[str | tuple[str, str]]
"""Each cell is a text, or one with its style."""
IMPORTING = "importing JAX"
"""What a command does first, in seconds."""
_WHOLE = 10_000
"""Characters that no row has."""
_FRAME = 3
"""Characters beside each cell."""
_LONG = 20
"""Characters of a word, such as a path, beyond which it may be cut."""


def print_table(columns: Sequence[str], rows: Iterable[Row]) -> None:
    """A table on standard output, as wide as the terminal, or as COLUMNS says; in a file or a pipe each row is a line.

    Where it does not fit, cells are folded between words; where that is not enough either, each cell has a line.
    """
    from rich.console import Console

    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    console = Console(width=None if has_width else _WHOLE)
    cells = [[_shown(cell) for cell in row] for row in rows]
    by_column = [[title, *(text.plain for text in column)] for title, *column in zip(columns, *cells, strict=True)]
    widths = _widths(by_column, console.width - _FRAME * len(columns) - 1)
    if widths is None:
        console.print(_as_lines(columns, cells), soft_wrap=True)
    else:
        console.print(_as_table(columns, cells, widths))


def _shown(cell: str | tuple[str, str]) -> "Text":
    from rich.text import Text

    words, *style = (cell,) if isinstance(cell, str) else cell
    return Text(on_screen(words), *style)


def _widths(by_column: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Of each column, all in so many characters; None where words would be cut."""
    least = [max(min(len(word), _LONG) for cell in column for word in cell.split() or [""]) for column in by_column]
    more = [max(map(len, column)) - own for column, own in zip(by_column, least, strict=True)]
    spare = width - sum(least)
    if spare < 0:
        return None
    widths = list(least)
    # What lacks little comes first, so that the fewest cells are folded.
    for left, place in enumerate(sorted(range(len(more)), key=more.__getitem__)):
        share = min(more[place], spare // (len(more) - left))
        widths[place] += share
        spare -= share
    return widths


def _as_table(columns: Sequence[str], cells: "Sequence[Sequence[Text]]", widths: Sequence[int]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for title, width in zip(columns, widths, strict=True):
        table.add_column(title, width=width, overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table


def _as_lines(columns: Sequence[str], cells: "Sequence[Sequence[Text]]") -> "Text":
    from rich.text import Text

    lines = [
        Text.assemble("" if place == 0 else "  ", f"{title}: " if title else "", text)
        for row in cells
        for place, (title, text) in enumerate(zip(columns, row, strict=True))
        if text.plain
    ]
    return Text("\n").join(lines)


class StatusLine:
    """What lasts, on standard error: on a terminal a line that goes again, elsewhere one that stays."""

    def __init__(self) -> None:
        self._drawn: Console | None = None
        self._said = ""

    def show(self, words: str, seconds: float) -> None:
        with contextlib.suppress(OSError, ValueError):  # Nobody reads it any more.
            if not (sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb")):
                self._say(words)
                return
            from rich.console import Console
            from rich.text import Text

            self.clear()
            self._drawn = Console(stderr=True, highlight=False)
            line = Text(f"{words} ... {seconds:.0f} s", "dim")
            # What is printed meanwhile begins at the left, over it.
            self._drawn.print(line, end="\r", no_wrap=True, overflow="ellipsis")

    def clear(self) -> None:
        if self._drawn is None:
            return
        from rich.control import Control
        from rich.segment import ControlType

        with contextlib.suppress(OSError, ValueError):
            self._drawn.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
        self._drawn = None

    def _say(self, words: str) -> None:
        if words != self._said:
            print(f"{words} ...", file=sys.stderr, flush=True)
        self._said = words
