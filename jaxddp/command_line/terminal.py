"""Prints tables to a terminal."""

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
"""A row of cells. A cell is a text, or a text with a style of rich."""
IMPORTING = "importing JAX"
"""The first status of a command. The import takes seconds."""
_WIDTH_OF_FILE = 10_000
"""The console's width in characters for output to a file or a pipe. It is larger than any row."""
_FRAME = 3
"""Number of characters between cells."""
_LONG = 20
"""The minimum length of a word, such as a path, that may be folded."""


def print_table(columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Print a table on standard output, with the width of the terminal or COLUMNS.

    In a file or a pipe, each row is one line. If the table is too wide, cells are folded between words. If it is still
    too wide, each cell gets its own line, which is folded, too. So no line is wider, and no text is left out.
    """
    console = _console()
    cells = [[_as_text(cell) for cell in row] for row in rows]
    by_column = [[title, *(text.plain for text in column)] for title, *column in zip(columns, *cells, strict=True)]
    widths = _widths(by_column, console.width - _FRAME * len(columns) - 1)
    if widths is None:
        console.print(_as_lines(columns, cells), overflow="fold")
    else:
        console.print(_as_table(columns, cells, widths))


def print_line(line: str) -> None:
    """Print a line on standard output, folded between words to the width of the terminal or COLUMNS."""
    _console().print(_as_text(line), overflow="fold", highlight=False)


def _console() -> "Console":
    from rich.console import Console

    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return Console(width=None if has_width else _WIDTH_OF_FILE)


def _as_text(cell: str | tuple[str, str]) -> "Text":
    from rich.text import Text

    words, *style = (cell,) if isinstance(cell, str) else cell
    return Text(on_screen(words), *style)


def _widths(by_column: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Return the width of each column for a total of `width` characters; None if words do not fit."""
    from rich.cells import cell_len

    # Some characters, such as Chinese ones, are two columns of the terminal wide.
    least = [
        max(min(cell_len(word), _LONG) for cell in column for word in cell.split() or [""]) for column in by_column
    ]
    more = [max(map(cell_len, column)) - minimum for column, minimum in zip(by_column, least, strict=True)]
    spare = width - sum(least)
    if spare < 0:
        return None
    widths = list(least)
    # Columns that need the least additional width get it first, so that the fewest cells are folded.
    for index, column in enumerate(sorted(range(len(more)), key=more.__getitem__)):
        share = min(more[column], spare // (len(more) - index))
        widths[column] += share
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
        Text.assemble("" if number == 0 else "  ", f"{title}: " if title else "", text)
        for row in cells
        for number, (title, text) in enumerate(zip(columns, row, strict=True))
        if text.plain
    ]
    return Text("\n").join(lines)
