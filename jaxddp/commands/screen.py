"""Rows for people, as a table on standard output."""

import sys
from collections.abc import Iterable, Sequence

from jaxddp.wording import on_screen

Row = Sequence[str | tuple[str, str]]
"""Each cell is a text, or one with its style."""


def print_table(columns: Sequence[str], rows: Iterable[Row]) -> None:
    """The last column is folded where the terminal is narrow."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=box.SIMPLE)
    table.columns[-1].overflow = "fold"
    for row in rows:
        cells = (on_screen(cell) if isinstance(cell, str) else (on_screen(cell[0]), cell[1]) for cell in row)
        table.add_row(*map(Text.assemble, cells))
    # A file, or the prefix of a launcher, has no width that a row would have to keep to.
    Console(width=None if sys.stdout.isatty() else 1000).print(table)
