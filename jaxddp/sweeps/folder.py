"""The folder of a sweep: `sweep.json` with its trials, claims of trials, and the table, `results.csv`, `report.html`.

Several hosts that share the folder may work on one sweep. A lock protects the changes of the file, and a host claims a
trial before it starts it.
"""

import contextlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxddp.core import files
from jaxddp.core.errors import InputError, Option, as_text, counted, duration, measure, show, some
from jaxddp.reports.compose import write_report
from jaxddp.reports.tables import NOTHING, Best, Estimate, RunFiles, is_run, json_object, number, read_runs, seed_groups
from jaxddp.sweeps.trials import FOLD, VAL_FOLD, Trial, all_folds, short_names, trial_name
from jaxddp.training.listeners.jsonl import ENDED, RESULT
from jaxddp.workdir.lock import is_locked

RESULTS, REPORT, SWEEP_FILE = "results.csv", "report.html", "sweep.json"
_LOCK, _CLAIMS = ".sweep.lock", ".claims"
_SEED = "seed"
_NAME = re.compile(r"\w[\w.+=-]*", re.ASCII)
_ANOTHER = ("give another ", Option("workdir"))


class SweepFolder:
    """The folder of a sweep of one config. Its file has the trials of all commands in the order of their creation.

    Args:
        config: the absolute path of the config's file, or the name of a built-in config; None to read any sweep.

    Attributes:
        claims: the locked files of the trials that this process has claimed, by their names.
    """

    def __init__(self, directory: Path, config: str | None = None):
        self.directory, self.path, self._config = directory, directory / SWEEP_FILE, config
        self.claims = dict[str, BinaryIO]()

    @contextlib.contextmanager
    def changed(self) -> Iterator[dict[str, Trial]]:
        """Yield the trials of the file by name, and write it after the block if the block changed them.

        Other hosts wait.

        Raises:
            InputError: the file is damaged or cannot be written, or belongs to a sweep of another config.
            Unreachable: another process holds the lock for a minute.
        """
        with files.one_at_a_time(files.create(self.directory) / _LOCK, patience=60.0):
            before = self._as_json(trials := self.read())
            yield trials
            if (after := self._as_json(trials)) != before or not self.path.exists():
                files.replace(self.path, after)

    def read(self) -> dict[str, Trial]:
        """Return the trials of the file by name; none if there is no file. Raises: InputError."""
        with files.reading(self.path, "restore it"):
            if not self.path.exists():
                return {}
            content = files.read(self.path)
        with files.parsing(self.path, ("restore it, or ", _ANOTHER), "is not the file of a sweep"):
            saved = files.parse_json(content, dict)
            config, trials = Path(saved["config"]), [Trial(**trial) for trial in saved["trials"]]
            for trial in trials:
                texts = [trial.name, *trial.words, *trial.values, *trial.values.values(), *(trial.finished_words or ())]
                is_sound = all(isinstance(text, str) for text in texts) and _NAME.fullmatch(trial.name)
                if not is_sound or trial.ended not in (None, "pruned", "failed"):
                    raise ValueError(f"trial {show(trial.name)} is damaged")
        # The project may have moved, or a container may see it elsewhere. Each trial has a digest of its recipe.
        if self._config is not None and Path(self._config).name != config.name:
            raise InputError(f"{self.path}: is a sweep of {config}, not of {self._config}", advice=_ANOTHER)
        return {trial.name: trial for trial in trials}

    def _as_json(self, trials: dict[str, Trial]) -> bytes:
        records = [{key: value for key, value in vars(trial).items() if value} for trial in trials.values()]
        return (json.dumps({"version": 1, "config": self._config, "trials": records}, indent=2) + "\n").encode()

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
        result, _ = json_object(self.directory / trial.name / RESULT)
        return trial.finished_words == trial.words and result.get("status") in ENDED

    def result(self, trial: Trial) -> "TrialResult":
        """Return the result of a trial so far."""
        place = self.directory / trial.name
        return TrialResult(trial, read_runs([place])[0] if is_run(place) else None)

    def results(self, earlier: Sequence[str] = ()) -> "list[TrialResult]":
        """Return the results of all trials, the best first. Trials without a validation are last, in their order.

        Args:
            earlier: the names of the trials of earlier commands. Those that were never started are left out.
        """
        found = [self.result(trial) for trial in self.read().values()]
        kept = [each for each in found if each.run is not None or each.trial.name not in earlier]
        return sorted(kept, key=lambda result: math.inf if result.best is None else result.best.rank)


class TrialResult(NamedTuple):
    """A trial with the files of its run; None if it was never started."""

    trial: Trial
    run: RunFiles | None

    @property
    def best(self) -> Best | None:
        """The best validation; None without a validation."""
        return self.run and self.run.best

    @property
    def measured(self) -> list[float]:
        """The value of the compared metric at each validation, the oldest first."""
        values = self.run.validations[self.best.metric] if self.run and self.best else np.zeros(0)
        return values[np.isfinite(values)].tolist()

    @property
    def status(self) -> str:
        """The status of the run; "pruned" or "failed" if the sweep ended it; "not trained"."""
        status = self.run.status if self.run else "not trained"
        return status if status in ("running", *ENDED) else self.trial.ended or status


def runs_and_images(place: Path, words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the runs that a command names, and its other words: those after the last run or sweep.

    Raises: see `runs_of`.
    """
    runs, words = runs_of(place), [*words]
    while words and (is_run(Path(words[0])) or Path(words[0], SWEEP_FILE).is_file()):
        runs += runs_of(Path(words.pop(0)))
    return runs, words


def runs_of(directory: Path) -> list[Path]:
    """Return the runs of a sweep, which must differ only in the fold and the seed; or the run itself.

    Raises: InputError, also if a run has not finished.
    """
    if not (directory / SWEEP_FILE).is_file():
        return [directory]
    folder = SweepFolder(directory)
    trials = [*folder.read().values()]
    if others := sorted({key for trial in trials for key in trial.values} - {FOLD, VAL_FOLD, _SEED}):
        raise InputError(f"{directory}: is a sweep that also varies {others[0]}", advice="name the runs of one recipe")
    if unfinished := [trial.name for trial in trials if not folder.is_finished(trial)]:
        fault = f"{directory}: {some(unfinished)} of its {counted(len(trials), 'run')} not finished"
        raise InputError(fault, advice="the command of the sweep continues it")
    return [directory / trial.name for trial in trials]


def _given(trial: Trial, key: str) -> str:
    """Return the value of a trial for a key; "" if it is absent, or the text of `--data.fold None`."""
    return "" if (value := trial.values.get(key, "")) == "None" else value


def folds_of(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Return the trials of all folds, in their order, by "-NAME" of their other values, or "" if there are none.

    Values with which a fold of `data.fold` has no trial are left out. The folds of `data.val_fold` are those given.
    """
    together = defaultdict[str, list[Trial]](list)
    of_folds = [trial for trial in trials if _given(trial, FOLD) or _given(trial, VAL_FOLD)]
    for trial in sorted(of_folds, key=lambda trial: (len(fold := _given(trial, FOLD)), fold)):
        others = {key: value for key, value in trial.values.items() if key not in (FOLD, VAL_FOLD)}
        together[f"-{trial_name(others)}" if others else ""].append(trial)
    folds = {name: [_given(trial, FOLD) for trial in group] for name, group in together.items()}
    complete = [name for name, found in folds.items() if found == all_folds(len(found)) or not any(found)]
    return {name: together[name] for name in complete}


def table(results: Sequence[TrialResult]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the cells of the table: the values of each trial, its status and its best validation."""
    keys, cells = _keys(results), list[list[str]]()
    for result in results:
        step, seconds = result.best and f"{result.best.step:,}", result.run and duration(result.run.duration)
        values = [result.trial.values.get(key, NOTHING) for key in keys]
        cells.append([*values, result.status, str(result.best or NOTHING), step or NOTHING, seconds or NOTHING])
    return [*short_names(keys).values(), "status", "best val", "at step", "time"], cells


def seed_table(results: Sequence[TrialResult]) -> tuple[list[str], list[list[str]]] | None:
    """Return a table of the mean best validation over the seeds of each recipe, the best first; None without seeds.

    Only trials that are done count. Trials with different values of another key are never in one group.
    """
    done = [(each, each.run, each.best) for each in results if each.run and each.run.is_done and each.best]
    together = dict[tuple[object, ...], list[tuple[TrialResult, Best]]]()
    for members in seed_groups([run for _, run, _ in done]):
        for each, _, best in [done[member] for member in members]:
            others = [item for item in sorted(each.trial.values.items()) if item[0] != _SEED]
            together.setdefault((members, *others), []).append((each, best))
    if not any(len(group) > 1 for group in together.values()):
        return None
    keys = [key for key in _keys([each for each, *_ in done]) if key != _SEED]
    rows = list[tuple[float, list[str]]]()
    for group in together.values():
        first, best = group[0]
        over_seeds = Estimate.of(best.metric, [each.value for _, each in group])
        values = [first.trial.values.get(key, NOTHING) for key in keys]
        measured = [measure(best.metric, str(over_seeds)), number(best.metric, over_seeds.deviation)]
        rows.append((best._replace(value=over_seeds.mean).rank, [*values, str(len(group)), *measured]))
    titles = [*short_names(keys).values(), "seeds", "mean best val", "standard deviation"]
    return titles, [row for _, row in sorted(rows, key=lambda row: row[0])]


def write_results(folder: Path, results: Sequence[TrialResult]) -> None:
    """Write `results.csv` with all digits of the numbers. Raises: InputError."""
    keys = _keys(results)
    rows = [["trial", *keys, "status", "metric", "best", "step", "seconds"]]
    for result in results:
        values = [as_text(result.trial.values.get(key, "")) for key in keys]
        measured = [result.best.metric, repr(result.best.value), result.best.step] if result.best else ["", "", ""]
        seconds = result.run and result.run.duration
        rows.append([result.trial.name, *values, result.status, *measured, "" if seconds is None else f"{seconds:.1f}"])
    files.replace_csv(folder / RESULTS, rows)


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
