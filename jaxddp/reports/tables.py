"""Tables of runs: progress, speed, the settings in which they differ, and the spread of metrics over their seeds."""

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxddp.core.errors as wording
from jaxddp.config import Config
from jaxddp.config.values import flatten
from jaxddp.core.errors import duration
from jaxddp.recipe.file import RUN_ID
from jaxddp.reports.run_files import RunFiles, is_run

NOTHING = "-"
_SHARES = ("data_wait_fraction", "flops_utilization")
"""Logged values of a step that are shares from 0 to 1."""
_FORMATS: dict[str, Callable[[float], str]] = dict.fromkeys(_SHARES, "{:.1%}".format)
_FORMATS |= {"peak_memory": wording.size, "images_per_second": wording.speed}
_DEEPEST, UNKNOWN = 5, "unknown"
_FREE = (
    *("seed", "data.path", "data.name", "data.data_dir", "data.local_cache", "parallel.", "log.", "checkpoint."),
    *("data.verify", "data.manifest", "eval.batch_size", "recipe.file", "objects.jax", RUN_ID),
)
"""Prefixes of the keys in which runs of one recipe may differ: devices, location of the data, logging."""
_RECIPE = (
    *("parallel.reproducible", "parallel.groups"),
    *("checkpoint.best", "checkpoint.best_is", "checkpoint.best_smoothing"),
)
"""The keys with one of these prefixes that change a result, or the validation that counts as the best."""
_NO_SETTINGS = ("fingerprint.", "objects.", "recipe.", RUN_ID)
"""Prefixes of the keys in config.json that are not settings."""
_HOOKS = "recipe.hooks"
"""The names of the recipe's hooks, which replace settings: with `get_model`, no setting names the network."""


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        colour: the colour of the run that the cell names.
        share: a value from 0 to 1, drawn as a bar behind the text.
    """

    text: str
    colour: str = ""
    share: float | None = None


class TextTable(NamedTuple):
    """A table. The columns after the first `texts` hold numbers. A `tall` table scrolls within its own box."""

    titles: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    texts: int = 1
    tall: bool = False


def is_share(metric: str) -> bool:
    """Return whether a metric or another logged value is a share from 0 to 1. Shares are written in percent."""
    return metric in _SHARES or wording.is_share(metric)


def number(metric: str, value: float | None) -> str:
    """Return a value of a metric as text."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return _FORMATS[metric](value) if metric in _FORMATS else wording.figure(metric, value)


def runs_below(directory: Path) -> list[Path]:
    """Return the work directories among a directory and its subfolders, up to a depth of five.

    Hidden folders and symbolic links are left out.
    """
    found = list[Path]()
    for place, folders, _ in os.walk(directory):
        depth, is_found = len(Path(place).relative_to(directory).parts), is_run(Path(place))
        found += [Path(place)] if is_found else []
        folders[:] = [name for name in folders if not (is_found or depth >= _DEEPEST or name.startswith("."))]
    return sorted(found)


def run_table(runs: Sequence[RunFiles], colours: Sequence[str] | None = None) -> TextTable:
    """Return a table of runs: progress, best and last validations, and time of training and validation."""
    titles = ("run", "status", "step", "best val", "at step", "last val", "epoch", "train + val time")
    rows = []
    for run, colour in zip(runs, colours or [""] * len(runs), strict=True):
        step = f"{run.step:,}" if run.total_steps is None else f"{run.step:,} of {run.total_steps:,}"
        best = at = last = NOTHING
        if run.best is not None:
            best, at, metric = str(run.best), f"{run.best.step:,}", run.best.metric
            last = f"{metric} {number(metric, float(run.validations[metric][-1]))}"
        epochs = [columns["epoch"][-1] for columns in run.series if np.isfinite(columns.get("epoch", [math.nan])[-1])]
        # The last step may begin another epoch: a run of 6 epochs can end at 6.01.
        epoch = f"{min(max(epochs), run.planned_epochs):.4g}" if epochs else NOTHING
        cells = (run.status, step, best, at, last, epoch, duration(run.duration))
        rows.append((Cell(run.name, colour), *map(Cell, cells)))
    return TextTable(titles, rows, texts=2)


def speed_table(runs: Sequence[RunFiles], colours: Sequence[str]) -> TextTable:
    """Return a table of runs: speed, waiting and utilization (medians of the logged steps), peak memory and time.

    Columns without values are left out.
    """
    titles = ("run", "images/s", "waiting for data", "FLOP utilization", "peak memory", "devices", "processes")
    titles, rows = (*titles, "training", "validation"), []
    for run, colour in zip(runs, colours, strict=True):
        cells = [_over_steps(run, name, np.nanmedian) for name in ("images_per_second", *_SHARES)]
        cells.append(_over_steps(run, "peak_memory", np.nanmax))
        counts = (run.result.get(name) for name in ("devices", "processes"))
        cells += [str(count) if isinstance(count, int) else NOTHING for count in counts]
        training = None if run.seconds is None or not len(run.seconds) else float(run.seconds[-1])
        cells += [duration(training), duration(run.validation_seconds)]
        rows.append((Cell(run.name, colour), *map(Cell, cells)))
    filled = [any(cell.text != NOTHING for cell in column) for column in zip(*rows, strict=True)]
    titles, *rows = (tuple(itertools.compress(row, filled)) for row in (titles, *rows))
    return TextTable(titles, rows)


def _over_steps(run: RunFiles, metric: str, reduce: Callable[[np.ndarray], Any]) -> str:
    values = run.series.train.get(metric)
    return number(metric, None if values is None or not np.isfinite(values).any() else float(reduce(values)))


Settings = dict[str, tuple[str, ...]]
"""The texts of the values of settings, by key."""


def differences(runs: Sequence[RunFiles]) -> Settings:
    """Return the value in each run of the settings that differ between runs, in the order of a config."""
    configs, defaults = [run.config for run in runs], flatten(Config().to_dict())
    keys = dict.fromkeys([*defaults, *(key for config in configs for key in config if key != RUN_ID)])
    settings = {key: tuple(_text(key, config, defaults) for config in configs) for key in keys}
    return {key: values for key, values in settings.items() if len({*values} - {UNKNOWN}) > 1}


def changes(run: RunFiles) -> Settings:
    """Return the default value and the run's value of the settings of a run that are not the default."""
    defaults = flatten(Config().to_dict())
    settings = {key: value for key, value in run.config.items() if key == _HOOKS or not key.startswith(_NO_SETTINGS)}
    both = {key: (_text(key, defaults, {}), _text(key, settings, defaults)) for key in settings}
    return {key: values for key, values in both.items() if len({*values}) > 1}


def seed_groups(runs: Sequence[RunFiles]) -> list[tuple[int, ...]]:
    """Return groups of the numbers of runs, in the order of the runs. The runs of a group differ in their seed alone.

    A run whose config cannot be read is a group of its own. A second run with the same seed is in another group.
    """
    defaults, groups, seeds = flatten(Config().to_dict()), dict[Any, list[int]](), Counter[Any]()
    for number, run in enumerate(runs):
        flat = run.config
        keys = [key for key in sorted({*defaults, *flat}) if key in _RECIPE or not key.startswith(_FREE)]
        recipe: Any = tuple((key, _text(key, flat, defaults)) for key in keys) if flat else number
        if flat.get("train.sync_every") is not None and flat.get("parallel.groups") is None:
            # Each process is a group of devices.
            recipe = recipe, run.result.get("processes")
        seed = recipe, flat.get("seed")
        groups.setdefault((recipe, seeds[seed]), []).append(number)
        seeds[seed] += 1
    return [tuple(members) for members in groups.values()]


def group_names(runs: Sequence[RunFiles], groups: Sequence[tuple[int, ...]]) -> list[str]:
    """Return a name for each group: the settings in which it differs from the other groups."""
    if len(groups) == 1:
        return ["all runs"]
    firsts = [runs[members[0]] for members in groups]
    keys = {key: values for key, values in differences(firsts).items() if not key.startswith(_NO_SETTINGS)}
    naming = [(key, values) for key, values in keys.items() if key in _RECIPE or not key.startswith(_FREE)]
    more = ", …" if len(naming) > 3 else ""
    names = [[f"{key.rpartition('.')[2]} {each[number]}" for key, each in naming[:3]] for number in range(len(groups))]
    return [", ".join(name) + more or first.name for name, first in zip(names, firsts, strict=True)]


def _text(key: str, flat: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    # A key that is newer than the run has its default. The config of a run from Python lacks whole sections, whose
    # values are unknown.
    section = key.partition(".")[0] + "."
    if key not in flat and key not in (_HOOKS, "seed") and not any(other.startswith(section) for other in flat):
        return UNKNOWN
    value = flat.get(key, defaults.get(key))
    if key.startswith(_NO_SETTINGS) and isinstance(value, str):
        return value[:12]
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


class SeedGroup(NamedTuple):
    """A group of runs that differ in their seed alone. The members are the numbers of the runs."""

    name: str
    colour: str
    members: tuple[int, ...]


def spread(values: Sequence[float]) -> list[float]:
    """Return mean, standard deviation (ddof 1; NaN for one value), minimum and maximum of at least one finite value."""
    array = np.array(values, np.float64)
    std = array.std(ddof=1) if len(array) > 1 else math.nan
    return [*map(float, (array.mean(), std, array.min(), array.max()))]


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
    if not (common := sorted(set.intersection(*map(set, row_of)))):
        return None
    rows = [[row[step] for step in common] for row in row_of]
    values = np.stack([run.validations[metric][kept] for run, kept in zip(runs, rows, strict=True)])
    of_runs = [run.positions(run.series.val) for run in runs]
    axes = [axis for axis in of_runs[0] if all(axis in of_run for of_run in of_runs)]
    positions = {axis: np.mean([x[axis][kept] for x, kept in zip(of_runs, rows, strict=True)], 0) for axis in axes}
    return MeanCurve(positions, values.mean(0), values.min(0), values.max(0))


def seed_table(runs: Sequence[RunFiles], groups: Sequence[SeedGroup]) -> TextTable:
    """Return a table of the spread of each metric in each group, at each run's best and at its last validation."""
    titles = ("runs", "metric", "validation", "n", "mean", "standard deviation", "minimum", "maximum")
    rows = []
    metrics = dict.fromkeys(name for run in runs for name in run.metrics)
    for metric, moment, group in itertools.product(metrics, ("best", "last"), groups):
        measured = [(runs[n].validations[metric], runs[n].best) for n in group.members if metric in runs[n].metrics]
        values = [float(column[best.row if moment == "best" else -1]) for column, best in measured if best]
        if finite := [value for value in values if math.isfinite(value)]:
            numbers = (number(metric, value) for value in spread(finite))
            rows.append((Cell(group.name, group.colour), *map(Cell, (metric, moment, str(len(finite)), *numbers))))
    return TextTable(titles, rows, texts=3)
