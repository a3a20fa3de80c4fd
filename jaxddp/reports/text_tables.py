"""Tables of text for the page and for the terminal, and the format of their numbers."""

import itertools
import math
from typing import NamedTuple

import jaxddp.core.wording as wording

NOTHING = "-"
_SHARES = ("data_wait_fraction", "flops_utilization")
"""Logged values of a step that are shares from 0 to 1."""


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        colour: the colour of the run that the cell names.
        share: a value from 0 to 1, drawn as a bar behind the text.
    """

    text: str
    colour: str = ""
    share: float | None = None


class Column(NamedTuple):
    """A column. A column of numbers is right-aligned."""

    title: str
    number: bool = True


class TextTable(NamedTuple):
    """A table. A `tall` table scrolls within its own box."""

    columns: tuple[Column, ...]
    rows: list[tuple[Cell, ...]]
    tall: bool = False


def without_empty_columns(table: TextTable) -> TextTable:
    """Return the table without its empty columns."""
    filled = [any(row[index].text != NOTHING for row in table.rows) for index in range(len(table.columns))]
    columns = tuple(itertools.compress(table.columns, filled))
    rows = [tuple(itertools.compress(row, filled)) for row in table.rows]
    return table._replace(columns=columns, rows=rows)


def is_share(metric: str) -> bool:
    """Return whether a metric or another logged value is a share from 0 to 1. Shares are written in percent."""
    return metric in _SHARES or wording.is_share(metric)


def number(metric: str, value: float | None) -> str:
    """Return a value of a metric as text."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if wording.is_share(metric):
        return wording.figure(metric, value)
    if metric in _SHARES:
        return f"{value:.1%}"
    if metric == "peak_memory":
        return wording.size(value)
    if metric == "images_per_second":
        return wording.speed(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else wording.decimal(value)
