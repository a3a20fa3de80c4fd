"""The tables of a report, as text: numbers are written here once, for the page and for the terminal."""

import math
from typing import NamedTuple

from jaxddp.wording import size

NOTHING = "-"
_SHARES = ("top", "accuracy", "data_wait_fraction", "flops_utilization")
"""How the names of metrics begin that are shares, from 0 to 1."""


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        colour: of the run that it names.
        share: from 0 to 1, drawn as a bar under the text.
    """

    text: str
    colour: str = ""
    share: float | None = None


class Column(NamedTuple):
    """A column; numbers are aligned at their right."""

    title: str
    number: bool = True


class Table(NamedTuple):
    """A table; one that is `tall` scrolls in a box of its own."""

    columns: tuple[Column, ...]
    rows: list[tuple[Cell, ...]]
    tall: bool = False


def without_empty_columns(table: Table) -> Table:
    """The same without the columns in which no row says anything."""
    told = [any(row[place].text != NOTHING for row in table.rows) for place in range(len(table.columns))]
    columns = tuple(column for column, tells in zip(table.columns, told, strict=True) if tells)
    rows = [tuple(cell for cell, tells in zip(row, told, strict=True) if tells) for row in table.rows]
    return table._replace(columns=columns, rows=rows)


def is_share(metric: str) -> bool:
    """Whether a metric, such as "top1" or "val_ema top1", is a share from 0 to 1, to be written in percent."""
    return metric.rpartition(" ")[2].startswith(_SHARES)


def number(metric: str, value: float | None) -> str:
    """A value of a metric as people read it."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if is_share(metric):
        return f"{value:.1%}"
    if metric == "peak_memory":
        return size(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"


def clock(seconds: float | None) -> str:
    """Seconds as people read them: `8.2 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60:,} h {minutes % 60:02} min"
