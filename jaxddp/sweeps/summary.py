"""The result of a sweep: a table with the best trial first, `results.csv`, and `report.html`."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.wording import as_text, duration
from jaxddp.reports.compose import write_report
from jaxddp.reports.differences import seed_groups
from jaxddp.reports.read_runs import is_run, read_runs
from jaxddp.reports.run_files import RunFiles
from jaxddp.reports.seeds import Spread
from jaxddp.reports.text_tables import NOTHING, number
from jaxddp.sweeps.sweep_folder import SweepFile, TrialRecord
from jaxddp.sweeps.trial_result import TrialResult, result_of_run
from jaxddp.sweeps.trials import short_names

RESULTS, REPORT = "results.csv", "report.html"
_SEED = "seed"


@dataclass(frozen=True)
class Row:
    """A trial in the table. A trial that was never started has no run."""

    record: TrialRecord
    run: RunFiles | None
    result: TrialResult

    @property
    def status(self) -> str:
        """The status of the run; "pruned" or "failed" if the sweep ended it; "not started"."""
        if self.run is None:
            return "not started"
        is_over = self.run.status in ("running", "done", "stopped")
        return self.run.status if is_over else self.record.ended or self.run.status


def rows_of(folder: Path, content: SweepFile, earlier: Sequence[str] = ()) -> list[Row]:
    """Return the rows of all trials, the best first. Trials without a validation are last, in their order.

    Args:
        earlier: the names of the trials of earlier commands. Those that were never started are left out.
    """
    rows = []
    for record in content.records.values():
        run = read_runs([folder / record.name])[0] if is_run(folder / record.name) else None
        if run is not None or record.name not in earlier:
            rows.append(Row(record, run, TrialResult() if run is None else result_of_run(run)))

    def rank(row: Row) -> tuple[bool, float]:
        best = row.result.best
        return best is None, 0.0 if best is None else best if row.result.lowest else -best

    return sorted(rows, key=rank)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the cells of the table: the values of each trial, its status and its best validation."""
    keys = _keys(rows)
    names = short_names(keys)
    titles = [*(names[key] for key in keys), "status", "best val", "at step", "time"]
    return titles, [[*(row.record.values.get(key, NOTHING) for key in keys), *_cells(row)] for row in rows]


def seed_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]] | None:
    """Return a table of the mean best validation over the seeds of each recipe, the best first; None without seeds.

    Only trials that are done count. Trials with different values of another key are never in one group.
    """
    by_values = dict[tuple[str, ...], list[Row]]()
    for row in rows:
        if row.run is not None and row.run.is_done and row.result.best is not None:
            values = tuple(str(value) for key, value in sorted(row.record.values.items()) if key != _SEED)
            by_values.setdefault(values, []).append(row)
    groups = [
        [measured[index] for index in group]
        for measured in by_values.values()
        for group in seed_groups([row.run for row in measured if row.run])
    ]
    if not any(len(group) > 1 for group in groups):
        return None
    keys = [key for key in _keys(rows) if key != _SEED]
    names = short_names(keys)
    spreads = [Spread.of([row.result.best or 0.0 for row in group]) for group in groups]
    sign = 1 if groups[0][0].result.lowest else -1
    cells = []
    for group, spread in sorted(zip(groups, spreads, strict=True), key=lambda pair: sign * pair[1].mean):
        metric = group[0].result.metric or ""
        numbers = [number(metric, value) for value in (spread.mean, spread.std)]
        values = [group[0].record.values.get(key, NOTHING) for key in keys]
        cells.append([*values, str(spread.n), f"{metric} {numbers[0]}", numbers[1]])
    return [*(names[key] for key in keys), "seeds", "mean best val", "standard deviation"], cells


def write_results(folder: Path, rows: Sequence[Row]) -> None:
    """Write `results.csv` with all digits of the numbers. Raises: InputError."""
    keys = _keys(rows)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["trial", *keys, "status", "metric", "best", "step", "seconds"])
    for row in rows:
        values = [as_text(row.record.values.get(key, "")) for key in keys]
        best = row.run.best if row.run else None
        measured = ["", "", ""] if best is None else [best.metric, repr(best.value), best.step]
        seconds = row.run.duration if row.run else None
        writer.writerow([row.record.name, *values, row.status, *measured, "" if seconds is None else f"{seconds:.1f}"])
    files.replace(folder / RESULTS, text.getvalue().encode(errors="surrogateescape"))


def report(folder: Path, rows: Sequence[Row]) -> str:
    """Write `report.html` about the trials that were started, and return a line about it.

    If a library of the report is not installed, the line names it.
    """
    directories = [folder / row.record.name for row in rows if row.run is not None]
    if not directories:
        return f"no {REPORT}: no trial has written anything"
    try:
        return write_report(directories, folder / REPORT, None)
    except InputError as error:
        return f"no {REPORT}: {error}"


def _keys(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row.record.values))


def _cells(row: Row) -> list[str]:
    best = row.run.best if row.run else None
    if row.run is None or best is None:
        return [row.status, NOTHING, NOTHING, NOTHING if row.run is None else duration(row.run.duration)]
    return [row.status, str(row.result), f"{best.step:,}", duration(row.run.duration)]
