"""The folder of a sweep: `sweep.json` with its trials, claims of trials, and the table, `results.csv`, `report.html`.

Several hosts that share the folder may work on one sweep. A lock protects the changes of the file, and a host claims a
trial before it starts it.
"""

import contextlib
import csv
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Option, Unreachable
from jaxddp.core.wording import as_text, duration, show
from jaxddp.reports.compose import write_report
from jaxddp.reports.run_files import RunFiles, is_run, read_runs
from jaxddp.reports.tables import NOTHING, Spread, number, seed_groups
from jaxddp.sweeps.trials import Trial, short_names
from jaxddp.training.listeners.jsonl import RESULT
from jaxddp.workdir.lock import is_locked, try_lock

RESULTS, REPORT = "results.csv", "report.html"
SWEEP_FILE = "sweep.json"
_LOCK, _CLAIMS = ".sweep.lock", ".claims"
_LOCK_SECONDS, _RETRY_SECONDS = 60.0, 0.05
_VERSION = 1
_SEED = "seed"


@dataclass
class TrialRecord:
    """A trial in `sweep.json`.

    Attributes:
        ended: "pruned" or "failed", if the sweep does not continue the trial for this reason; else None.
        finished_words: the arguments with which the sweep last saw the trial finish. With other arguments, such as a
            longer duration, the trial is started again.
    """

    name: str
    values: dict[str, str]
    words: list[str]
    ended: Literal["pruned", "failed"] | None = None
    finished_words: list[str] | None = None


@dataclass
class SweepFile:
    """The content of `sweep.json`: the config, and the trials of all commands so far in the order of their creation."""

    config: str
    records: dict[str, TrialRecord] = field(default_factory=dict)

    def add(self, trial: Trial) -> None:
        """Add a trial, or give a known trial its present arguments."""
        record = self.records.setdefault(trial.name, TrialRecord(trial.name, {}, []))
        record.values, record.words = dict(trial.values), list(trial.words)

    def to_json(self) -> bytes:
        trials = [{key: value for key, value in vars(record).items() if value} for record in self.records.values()]
        content = {"version": _VERSION, "config": self.config, "trials": trials}
        return (json.dumps(content, indent=2) + "\n").encode()

    @classmethod
    def from_json(cls, content: bytes) -> "SweepFile":
        """Read the result of `to_json`. Raises: ValueError, KeyError, TypeError or AttributeError for other content."""
        saved: Mapping[str, Any] = files.parse_json(content, dict)
        if saved["version"] != _VERSION:
            raise ValueError(f"version {saved['version']} instead of {_VERSION}")
        records = [TrialRecord(**trial) for trial in saved["trials"]]
        for record in records:
            texts = [saved["config"], record.name, *record.values, *record.values.values(), *record.words]
            if not all(isinstance(text, str) for text in [*texts, *(record.finished_words or ())]):
                raise ValueError(f"trial {show(record.name)} has other values than texts")
            if record.ended not in (None, "pruned", "failed"):
                raise ValueError(f"trial {show(record.name)} has ended as {show(record.ended)}")
        return cls(saved["config"], {record.name: record for record in records})


class SweepFolder:
    """The folder of a sweep of one config.

    Args:
        config: the absolute path of the config's file, or the name of a built-in config.
    """

    def __init__(self, directory: Path, config: str):
        self.directory, self._config = directory, config
        self._claims: dict[str, BinaryIO] = {}

    @property
    def path(self) -> Path:
        return self.directory / SWEEP_FILE

    @contextlib.contextmanager
    def changed(self) -> Iterator[SweepFile]:
        """Yield the content of the file, and write it after the block if the block changed it. Other hosts wait.

        Raises:
            InputError: the file is damaged, or belongs to a sweep of another config.
            Unreachable: another process holds the lock for a minute.
        """
        files.create(self.directory)
        with self._locked():
            content = self.read()
            before = content.to_json()
            yield content
            after = content.to_json()
            if after != before or not self.path.exists():
                files.replace(self.path, after)

    def read(self) -> SweepFile:
        """Return the content of the file; without trials if there is no file. Raises: InputError."""
        try:
            content = SweepFile.from_json(files.read(self.path))
        except FileNotFoundError:
            return SweepFile(self._config)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror}); restore it") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            advice = ("restore it, or give another ", Option("workdir"))
            raise InputError(f"{self.path}: is not the file of a sweep ({error})", advice=advice) from None
        if content.config != self._config:
            advice = ("give another ", Option("workdir"))
            raise InputError(f"{self.path}: is a sweep of {content.config}, not of {self._config}", advice=advice)
        return content

    def update(self, name: str, **changes: Any) -> None:
        """Change fields of a trial's record."""
        with self.changed() as content:
            for key, value in changes.items():
                setattr(content.records[name], key, value)

    def claim(self, name: str) -> bool:
        """Claim a trial for this process, and return True; False if another process runs it.

        A claim ends by `release` or with the process.
        """
        if self.is_claimed(name) or is_locked(self.directory / name):
            return False
        path = files.create(self.directory / _CLAIMS) / name
        with files.readable_errors(path):
            file = files.open_regular(path, "ab")
        if not try_lock(file):
            file.close()
            return False
        self._claims[name] = file
        return True

    def is_claimed(self, name: str) -> bool:
        """Return whether this process has claimed a trial."""
        return name in self._claims

    def release(self, name: str) -> None:
        """End the claim of a trial."""
        self._claims.pop(name).close()

    def close(self) -> None:
        """End all claims."""
        for name in [*self._claims]:
            self.release(name)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        path, deadline = self.directory / _LOCK, time.monotonic() + _LOCK_SECONDS
        with files.readable_errors(path):
            lock = files.open_regular(path, "ab")
        with lock:
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    problem = f"{path}: another process has locked it for {_LOCK_SECONDS:g} s"
                    raise Unreachable(f"{problem}; end that process")
                time.sleep(_RETRY_SECONDS)
            yield


@dataclass(frozen=True)
class TrialResult:
    """The validations of a trial so far.

    Attributes:
        metric: the compared metric, as `RunFiles.best` names it; None without a validation.
        lowest: whether a lower value is better.
        best: the value at the best validation.
        values: the value of the metric at each validation, the oldest first.
    """

    metric: str | None = None
    lowest: bool = False
    best: float | None = None
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        return NOTHING if self.metric is None else f"{self.metric} {number(self.metric, self.best)}"


def is_finished(directory: Path, record: TrialRecord) -> bool:
    """Return whether the sweep has seen a trial end with its present arguments.

    If a trial was trained by its own command, its arguments are not known. `jaxddp train` then decides what is left.
    """
    if record.finished_words != record.words:
        return False
    try:
        return files.parse_json(files.read(directory / RESULT), dict).get("status") in ("done", "stopped")
    except (OSError, ValueError):
        return False


def result_of(directory: Path) -> TrialResult:
    """Return the result of a trial; without values if its run has no validation yet."""
    return result_of_run(read_runs([directory])[0]) if is_run(directory) else TrialResult()


def result_of_run(run: RunFiles) -> TrialResult:
    """Return the result of a run by its own goal, `checkpoint.best`, or by the loss if that was not measured."""
    if run.best is None:
        return TrialResult()
    metric = run.best.metric
    lowest = run.goal.lowest if metric == run.goal.metric else True
    values = run.validations[metric]
    return TrialResult(metric, lowest, run.best.value, tuple(values[np.isfinite(values)].tolist()))


@dataclass(frozen=True)
class TrialRow:
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


def rows_of(folder: Path, content: SweepFile, earlier: Sequence[str] = ()) -> list[TrialRow]:
    """Return the rows of all trials, the best first. Trials without a validation are last, in their order.

    Args:
        earlier: the names of the trials of earlier commands. Those that were never started are left out.
    """
    rows = []
    for record in content.records.values():
        run = read_runs([folder / record.name])[0] if is_run(folder / record.name) else None
        if run is not None or record.name not in earlier:
            rows.append(TrialRow(record, run, TrialResult() if run is None else result_of_run(run)))

    def rank(row: TrialRow) -> tuple[bool, float]:
        best = row.result.best
        return best is None, 0.0 if best is None else best if row.result.lowest else -best

    return sorted(rows, key=rank)


def table(rows: Sequence[TrialRow]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the cells of the table: the values of each trial, its status and its best validation."""
    keys = _keys(rows)
    names = short_names(keys)
    titles = [*(names[key] for key in keys), "status", "best val", "at step", "time"]
    return titles, [[*(row.record.values.get(key, NOTHING) for key in keys), *_cells(row)] for row in rows]


def seed_table(rows: Sequence[TrialRow]) -> tuple[list[str], list[list[str]]] | None:
    """Return a table of the mean best validation over the seeds of each recipe, the best first; None without seeds.

    Only trials that are done count. Trials with different values of another key are never in one group.
    """
    by_values = dict[tuple[str, ...], list[TrialRow]]()
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


def write_results(folder: Path, rows: Sequence[TrialRow]) -> None:
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


def report(folder: Path, rows: Sequence[TrialRow]) -> str:
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


def _keys(rows: Sequence[TrialRow]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row.record.values))


def _cells(row: TrialRow) -> list[str]:
    best = row.run.best if row.run else None
    if row.run is None or best is None:
        return [row.status, NOTHING, NOTHING, NOTHING if row.run is None else duration(row.run.duration)]
    return [row.status, str(row.result), f"{best.step:,}", duration(row.run.duration)]
