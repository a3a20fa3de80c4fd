"""Tables of runs: their progress, their metrics and their speed."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxddp.core.wording import duration
from jaxddp.reports.read_runs import is_run
from jaxddp.reports.run_files import RunFiles
from jaxddp.reports.text_tables import NOTHING, Cell, Column, TextTable, number, without_empty_columns

_DEEPEST = 5
_MEDIANS = ("images_per_second", "data_wait_fraction", "flops_utilization")


def runs_below(directory: Path) -> list[Path]:
    """Return the work directories among a directory and its subfolders, up to a depth of five.

    Hidden folders and symbolic links are left out.
    """
    return sorted(_runs_below(directory, _DEEPEST))


def _runs_below(directory: Path, depth: int) -> Iterator[Path]:
    if is_run(directory):
        yield directory
    elif depth:
        try:
            entries = [*os.scandir(directory)]
        except OSError:
            return  # The folder is not readable, or was just removed.
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _runs_below(directory / entry.name, depth - 1)


def run_table(runs: Sequence[RunFiles], colours: Sequence[str] | None = None) -> TextTable:
    """Return a table of runs: progress, best and last validations, and time of training and validation."""
    titles = ("step", "best val", "at step", "last val", "epoch", "train + val time")
    columns = (Column("run", number=False), Column("status", number=False), *map(Column, titles))
    rows = []
    for run, colour in zip(runs, colours or [""] * len(runs), strict=True):
        step = f"{run.step:,}" if run.total_steps is None else f"{run.step:,} of {run.total_steps:,}"
        best = NOTHING if run.best is None else f"{run.best.metric} {number(run.best.metric, run.best.value)}"
        at = NOTHING if run.best is None else f"{run.best.step:,}"
        cells = (run.status, step, best, at, _last(run), _epoch(run), duration(run.duration))
        rows.append((Cell(run.name, colour), *map(Cell, cells)))
    return TextTable(columns, rows)


def speed_table(runs: Sequence[RunFiles], colours: Sequence[str]) -> TextTable:
    """Return a table of runs: speed, waiting and utilization (medians of the logged steps), peak memory and time."""
    titles = ("images/s", "waiting for data", "FLOP utilization", "peak memory", "devices", "processes")
    columns = (
        Column("run", number=False),
        *map(Column, titles),
        Column("training"),
        Column("validation"),
    )
    rows = []
    for run, colour in zip(runs, colours, strict=True):
        medians = [number(name, _median(run, name)) for name in _MEDIANS]
        counts = [_count(run.result.get(name)) for name in ("devices", "processes")]
        training = None if run.seconds is None or not len(run.seconds) else float(run.seconds[-1])
        times = duration(training), duration(run.validation_seconds)
        cells = (*medians, number("peak_memory", _peak_memory(run)), *counts, *times)
        rows.append((Cell(run.name, colour), *map(Cell, cells)))
    return without_empty_columns(TextTable(columns, rows))


def _epoch(run: RunFiles) -> str:
    last = [float(columns["epoch"][-1]) for columns in run.series if "epoch" in columns]
    finite = [epoch for epoch in last if np.isfinite(epoch)]
    # The last step may begin another epoch: a run of 6 epochs can end at 6.01.
    return f"{min(max(finite), run.planned_epochs):.4g}" if finite else NOTHING


def _last(run: RunFiles) -> str:
    if run.best is None:
        return NOTHING
    metric = run.best.metric
    return f"{metric} {number(metric, float(run.validations[metric][-1]))}"


def _median(run: RunFiles, metric: str) -> float | None:
    values = run.series.train.get(metric)
    return None if values is None or not np.isfinite(values).any() else float(np.nanmedian(values))


def _peak_memory(run: RunFiles) -> float | None:
    values = run.series.train.get("peak_memory")
    return None if values is None or not np.isfinite(values).any() else float(np.nanmax(values))


def _count(value: object) -> str:
    return str(value) if isinstance(value, int) else NOTHING
