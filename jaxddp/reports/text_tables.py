"""The tables of a report, as text: numbers are written here once, for the page and for the terminal."""

import math
from typing import NamedTuple

import jaxddp.core.wording as wording

NOTHING = "-"
_OF_TIME = ("data_wait_fraction", "flops_utilization")
"""What is logged of a step that is a share, too."""


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


class TextTable(NamedTuple):
    """A table; one that is `tall` scrolls in a box of its own."""

    columns: tuple[Column, ...]
    rows: list[tuple[Cell, ...]]
    tall: bool = False


def without_empty_columns(table: TextTable) -> TextTable:
    """The same without the columns in which no row says anything."""
    told = [any(row[place].text != NOTHING for row in table.rows) for place in range(len(table.columns))]
    columns = tuple(column for column, tells in zip(table.columns, told, strict=True) if tells)
    rows = [tuple(cell for cell, tells in zip(row, told, strict=True) if tells) for row in table.rows]
    return table._replace(columns=columns, rows=rows)


def is_share(metric: str) -> bool:
    """Whether a metric, or what else is logged of a step, is a share from 0 to 1, to be written in percent."""
    return metric in _OF_TIME or wording.is_share(metric)


def number(metric: str, value: float | None) -> str:
    """A value of a metric as people read it."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if wording.is_share(metric):
        return wording.figure(metric, value)
    if metric in _OF_TIME:
        return f"{value:.1%}"
    if metric == "peak_memory":
        return wording.size(value)
    if metric == "images_per_second":
        return wording.speed(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else wording.decimal(value)
