"""Several seeds of one recipe as one: mean and spread of what validation measured."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxddp.reports.run_files import RunFiles
from jaxddp.reports.text_tables import Cell, Column, TextTable, number


class SeedGroup(NamedTuple):
    """Runs, by number, that differ in their seed alone."""

    name: str
    colour: str
    members: tuple[int, ...]


class Spread(NamedTuple):
    """Of n values the mean, the standard deviation of a sample (ddof 1; NaN of one value), the least and the most."""

    n: int
    mean: float
    std: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """That of finite values, at least one."""
        array = np.array(values, np.float64)
        std = float(array.std(ddof=1)) if len(array) > 1 else float("nan")
        return cls(len(array), float(array.mean()), std, float(array.min()), float(array.max()))


class MeanCurve(NamedTuple):
    """What several runs measured at the steps that all of them have, float64[n] each.

    Attributes:
        positions: by axis; of the time the mean.
    """

    positions: dict[str, np.ndarray]
    mean: np.ndarray
    least: np.ndarray
    most: np.ndarray


def mean_curve(runs: Sequence[RunFiles], metric: str) -> MeanCurve | None:
    """A metric of validation over several runs; None where they have no step in common, or one lacks the metric."""
    if not all(metric in run.validations for run in runs):
        return None
    # A step that was validated twice counts as it was last.
    row_of = [dict(zip(run.series.val["step"].tolist(), itertools.count(), strict=False)) for run in runs]
    common = sorted(set.intersection(*map(set, row_of)))
    if not common:
        return None
    rows = [[own[step] for step in common] for own in row_of]
    values = np.stack([run.validations[metric][own] for run, own in zip(runs, rows, strict=True)])
    places = [run.positions(run.series.val) for run in runs]
    axes = [axis for axis in places[0] if all(axis in place for place in places)]
    positions = {axis: np.mean([place[axis][own] for place, own in zip(places, rows, strict=True)], 0) for axis in axes}
    return MeanCurve(positions, values.mean(0), values.min(0), values.max(0))


def spread_of(runs: Sequence[RunFiles], metric: str, moment: str) -> Spread | None:
    """Of a metric over the runs that have it, at each run's "best" validation or at its "last"; None without any."""
    values = [value for run in runs if (value := _value(run, metric, moment)) is not None]
    return Spread.of(values) if values else None


def seed_table(runs: Sequence[RunFiles], groups: Sequence[SeedGroup]) -> TextTable:
    """The spreads of groups of runs."""
    titles = ("metric", "validation", "n", "mean", "standard deviation", "least", "most")
    columns = (Column("runs", number=False), *(Column(title, number=place > 1) for place, title in enumerate(titles)))
    rows = []
    metrics = dict.fromkeys(name for run in runs for name in run.metrics)
    for metric, moment, group in itertools.product(metrics, ("best", "last"), groups):
        spread = spread_of([runs[member] for member in group.members], metric, moment)
        if spread is not None:
            told = (number(metric, value) for value in spread[1:])
            rows.append((Cell(group.name, group.colour), *map(Cell, (metric, moment, str(spread.n), *told))))
    return TextTable(columns, rows)


def _value(run: RunFiles, metric: str, moment: str) -> float | None:
    values = run.validations.get(metric)
    if values is None or not len(values) or run.best is None:
        return None
    value = float(values[run.best.row if moment == "best" else -1])
    return value if np.isfinite(value) else None
