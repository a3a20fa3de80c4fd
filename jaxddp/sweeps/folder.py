"""The folder of a sweep: `sweep.json` with its trials, claims of trials, and the table, `results.csv`, `report.html`.

Several hosts that share the folder may work on one sweep. A lock protects the changes of the file, and a host claims a
trial before it starts it.
"""

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxddp.core import files
from jaxddp.core.errors import InputError, Option, as_text, duration, show
from jaxddp.reports.compose import write_report
from jaxddp.reports.run_files import RunFiles, is_run, read_runs
from jaxddp.reports.tables import NOTHING, Spread, number, seed_groups
from jaxddp.sweeps.trials import Trial, short_names
from jaxddp.training.listeners.jsonl import RESULT
from jaxddp.workdir.lock import is_locked

RESULTS, REPORT = "results.csv", "report.html"
SWEEP_FILE = "sweep.json"
_LOCK, _CLAIMS = ".sweep.lock", ".claims"
_LOCK_SECONDS = 60.0
_VERSION = 1
_SEED = "seed"
_ANOTHER = ("give another ", Option("workdir"))


class SweepFolder:
    """The folder of a sweep of one config. Its file has the trials of all commands in the order of their creation.

    Args:
        config: the absolute path of the config's file, or the name of a built-in config.

    Attributes:
        claims: the locked files of the trials that this process has claimed, by their names.
    """

    def __init__(self, directory: Path, config: str):
        self.directory, self.path, self._config = directory, directory / SWEEP_FILE, config
        self.claims = dict[str, BinaryIO]()

    @contextlib.contextmanager
    def changed(self) -> Iterator[dict[str, Trial]]:
        """Yield the trials of the file by name, and write it after the block if the block changed them.

        Other hosts wait.

        Raises:
            InputError: the file is damaged, or belongs to a sweep of another config.
            Unreachable: another process holds the lock for a minute.
        """
        with files.one_at_a_time(self.directory / _LOCK, _LOCK_SECONDS):
            trials = self.read()
            before = self._as_json(trials)
            yield trials
            if (after := self._as_json(trials)) != before or not self.path.exists():
                files.replace(self.path, after)

    def read(self) -> dict[str, Trial]:
        """Return the trials of the file by name; none if there is no file. Raises: InputError."""
        try:
            saved = files.parse_json(files.read(self.path), dict)
            trials = [Trial(**trial) for trial in saved["trials"]]
            if saved["version"] != _VERSION:
                raise ValueError(f"version {saved['version']} instead of {_VERSION}")
            for trial in trials:
                texts = [trial.name, *trial.words, *trial.values, *trial.values.values(), *(trial.finished_words or ())]
                if not all(isinstance(text, str) for text in texts) or trial.ended not in (None, "pruned", "failed"):
                    raise ValueError(f"trial {show(trial.name)} is damaged")
            config = saved["config"]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror}); restore it") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{self.path}: is not the file of a sweep ({error})", advice=("restore it, or ", _ANOTHER)
            ) from None
        if config != self._config:
            raise InputError(f"{self.path}: is a sweep of {config}, not of {self._config}", advice=_ANOTHER)
        return {trial.name: trial for trial in trials}

    def _as_json(self, trials: dict[str, Trial]) -> bytes:
        records = [{key: value for key, value in vars(trial).items() if value} for trial in trials.values()]
        return (json.dumps({"version": _VERSION, "config": self._config, "trials": records}, indent=2) + "\n").encode()

    def claim(self, name: str) -> bool:
        """Claim a trial for this process, and return True; False if another process runs it.

        A claim ends by `release` or with the process.
        """
        if name in self.claims or is_locked(self.directory / name):
            return False
        path = files.create(self.directory / _CLAIMS) / name
        with files.readable_errors(path):
            file = files.open_regular(path, "ab")
        if not files.try_lock(file):
            file.close()
            return False
        self.claims[name] = file
        return True

    def release(self, name: str) -> None:
        """End the claim of a trial."""
        self.claims.pop(name).close()

    def is_finished(self, trial: Trial) -> bool:
        """Return whether the sweep has seen a trial end with its present arguments.

        If a trial was trained by its own command, its arguments are not known. `jaxddp train` then decides what is
        left.
        """
        if trial.finished_words != trial.words:
            return False
        try:
            result = files.parse_json(files.read(self.directory / trial.name / RESULT), dict)
        except (OSError, ValueError):
            return False
        return result.get("status") in ("done", "stopped")

    def result(self, trial: Trial) -> "TrialResult":
        """Return the result of a trial by the goal of its run, `checkpoint.best`, or else by the loss."""
        place = self.directory / trial.name
        run = read_runs([place])[0] if is_run(place) else None
        if run is None or run.best is None:
            return TrialResult(trial, run)
        metric = run.best.metric
        lowest = run.goal.lowest if metric == run.goal.metric else True
        values = run.validations[metric]
        return TrialResult(trial, run, metric, lowest, run.best.value, values[np.isfinite(values)].tolist())

    def results(self, earlier: Sequence[str] = ()) -> "list[TrialResult]":
        """Return the results of all trials, the best first. Trials without a validation are last, in their order.

        Args:
            earlier: the names of the trials of earlier commands. Those that were never started are left out.
        """
        found = [self.result(trial) for trial in self.read().values()]

        def rank(result: TrialResult) -> tuple[bool, float]:
            best = result.best
            return best is None, 0.0 if best is None else best if result.lowest else -best

        return sorted((each for each in found if each.run is not None or each.trial.name not in earlier), key=rank)


@dataclass(frozen=True)
class TrialResult:
    """A trial with its run and the validations so far.

    Attributes:
        run: the files of the run; None if the trial was never started.
        metric: the compared metric, as `RunFiles.best` names it; None without a validation.
        lowest: whether a lower value is better.
        best: the value at the best validation.
        values: the value of the metric at each validation, the oldest first.
    """

    trial: Trial
    run: RunFiles | None = None
    metric: str | None = None
    lowest: bool = False
    best: float | None = None
    values: Sequence[float] = ()

    def __str__(self) -> str:
        return NOTHING if self.metric is None else f"{self.metric} {number(self.metric, self.best)}"

    @property
    def status(self) -> str:
        """The status of the run; "pruned" or "failed" if the sweep ended it; "not started"."""
        if self.run is None:
            return "not started"
        is_over = self.run.status in ("running", "done", "stopped")
        return self.run.status if is_over else self.trial.ended or self.run.status


def table(results: Sequence[TrialResult]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the cells of the table: the values of each trial, its status and its best validation."""
    keys, cells = _keys(results), list[list[str]]()
    for result in results:
        run = result.run
        step = f"{run.best.step:,}" if run and run.best else NOTHING
        values = [result.trial.values.get(key, NOTHING) for key in keys]
        cells.append([*values, result.status, str(result), step, duration(run.duration) if run else NOTHING])
    return [*short_names(keys).values(), "status", "best val", "at step", "time"], cells


def seed_table(results: Sequence[TrialResult]) -> tuple[list[str], list[list[str]]] | None:
    """Return a table of the mean best validation over the seeds of each recipe, the best first; None without seeds.

    Only trials that are done count. Trials with different values of another key are never in one group.
    """
    done = [each for each in results if each.run is not None and each.run.is_done and each.best is not None]
    together = dict[tuple[object, ...], list[TrialResult]]()
    for members in seed_groups([each.run for each in done if each.run]):
        for each in (done[member] for member in members):
            others = [item for item in sorted(each.trial.values.items()) if item[0] != _SEED]
            together.setdefault((members, *others), []).append(each)
    if not any(len(group) > 1 for group in together.values()):
        return None
    keys, sign = [key for key in _keys(done) if key != _SEED], 1 if done[0].lowest else -1
    rows = list[tuple[float, list[str]]]()
    for first, *more in together.values():
        spread = Spread.of([each.best or 0.0 for each in (first, *more)])
        mean, std = (number(first.metric or "", value) for value in (spread.mean, spread.std))
        values = [first.trial.values.get(key, NOTHING) for key in keys]
        rows.append((sign * spread.mean, [*values, str(spread.n), f"{first.metric} {mean}", std]))
    titles = [*short_names(keys).values(), "seeds", "mean best val", "standard deviation"]
    return titles, [row for _, row in sorted(rows, key=lambda row: row[0])]


def write_results(folder: Path, results: Sequence[TrialResult]) -> None:
    """Write `results.csv` with all digits of the numbers. Raises: InputError."""
    keys, text = _keys(results), io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["trial", *keys, "status", "metric", "best", "step", "seconds"])
    for result in results:
        values = [as_text(result.trial.values.get(key, "")) for key in keys]
        best, seconds = (result.run.best, result.run.duration) if result.run else (None, None)
        measured = ["", "", ""] if best is None else [best.metric, repr(best.value), best.step]
        time = "" if seconds is None else f"{seconds:.1f}"
        writer.writerow([result.trial.name, *values, result.status, *measured, time])
    files.replace(folder / RESULTS, text.getvalue().encode(errors="surrogateescape"))


def report(folder: Path, results: Sequence[TrialResult]) -> str:
    """Write `report.html` about the trials that were started, and return a line about it.

    If a library of the report is not installed, the line names it.
    """
    directories = [folder / result.trial.name for result in results if result.run is not None]
    if not directories:
        return f"no {REPORT}: no trial has written anything"
    try:
        return write_report(directories, folder / REPORT, None)
    except InputError as error:
        return f"no {REPORT}: {error}"


def _keys(results: Sequence[TrialResult]) -> list[str]:
    return list(dict.fromkeys(key for result in results for key in result.trial.values))
