"""Rows for people, as a table on standard output."""

import sys
from collections.abc import Iterable, Sequence

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
        table.add_row(*map(Text.assemble, row))
    # A file, or the prefix of a launcher, has no width that a row would have to keep to.
    Console(width=None if sys.stdout.isatty() else 1000).print(table)
