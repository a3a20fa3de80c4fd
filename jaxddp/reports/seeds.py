"""Means and spreads of validation metrics over several seeds of one recipe."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxddp.reports.run_files import RunFiles
from jaxddp.reports.text_tables import Cell, Column, TextTable, number


class SeedGroup(NamedTuple):
    """A group of runs that differ in their seed alone. The members are the numbers of the runs."""

    name: str
    colour: str
    members: tuple[int, ...]


class Spread(NamedTuple):
    """Mean, standard deviation (ddof 1; NaN for one value), minimum and maximum of n values."""

    n: int
    mean: float
    std: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value. All values must be finite."""
        array = np.array(values, np.float64)
        std = float(array.std(ddof=1)) if len(array) > 1 else float("nan")
        return cls(len(array), float(array.mean()), std, float(array.min()), float(array.max()))


class MeanCurve(NamedTuple):
    """Mean, minimum and maximum over several runs at their common steps, float64[n] each.

    Attributes:
        positions: the x values by axis, float64[n] each, as means over the runs.
    """

    positions: dict[str, np.ndarray]
    mean: np.ndarray
    least: np.ndarray
    most: np.ndarray


def mean_curve(runs: Sequence[RunFiles], metric: str) -> MeanCurve | None:
    """Return the mean of a validation metric over runs; None if they have no common step or one lacks the metric."""
    if not all(metric in run.validations for run in runs):
        return None
    # If a step has two validations, the last validation is used.
    row_of = [dict(zip(run.series.val["step"].tolist(), itertools.count(), strict=False)) for run in runs]
    common = sorted(set.intersection(*map(set, row_of)))
    if not common:
        return None
    rows = [[row[step] for step in common] for row in row_of]
    values = np.stack([run.validations[metric][kept] for run, kept in zip(runs, rows, strict=True)])
    of_runs = [run.positions(run.series.val) for run in runs]
    axes = [axis for axis in of_runs[0] if all(axis in of_run for of_run in of_runs)]
    positions = {axis: np.mean([x[axis][kept] for x, kept in zip(of_runs, rows, strict=True)], 0) for axis in axes}
    return MeanCurve(positions, values.mean(0), values.min(0), values.max(0))


def spread_of(runs: Sequence[RunFiles], metric: str, moment: str) -> Spread | None:
    """Return the spread of a metric at each run's "best" or "last" validation; None if no run has the metric."""
    values = [value for run in runs if (value := _value(run, metric, moment)) is not None]
    return Spread.of(values) if values else None


def seed_table(runs: Sequence[RunFiles], groups: Sequence[SeedGroup]) -> TextTable:
    """Return a table of the spread of each metric in each group of runs."""
    titles = ("metric", "validation", "n", "mean", "standard deviation", "minimum", "maximum")
    columns = (Column("runs", number=False), *(Column(title, number=place > 1) for place, title in enumerate(titles)))
    rows = []
    metrics = dict.fromkeys(name for run in runs for name in run.metrics)
    for metric, moment, group in itertools.product(metrics, ("best", "last"), groups):
        spread = spread_of([runs[member] for member in group.members], metric, moment)
        if spread is not None:
            numbers = (number(metric, value) for value in spread[1:])
            rows.append((Cell(group.name, group.colour), *map(Cell, (metric, moment, str(spread.n), *numbers))))
    return TextTable(columns, rows)


def _value(run: RunFiles, metric: str, moment: str) -> float | None:
    values = run.validations.get(metric)
    if values is None or not len(values) or run.best is None:
        return None
    value = float(values[run.best.row if moment == "best" else -1])
    return value if np.isfinite(value) else None
