"""The content of the work directories of runs, which may still be training; a damaged file is a fault of its run."""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.goal import VAL, VAL_EMA, Goal
from jaxddp.config.values import flatten
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, figure
from jaxddp.recipe.sources import CONFIG_FILE
from jaxddp.training.checkpoints.integrity import CHECKPOINTS, VALIDATION_FILE, ValidationFile
from jaxddp.training.events import Columns, Series
from jaxddp.training.listeners.jsonl import METRICS, NOT_MEASURED, RESULT, parse, series
from jaxddp.workdir.lock import is_locked


class Best(NamedTuple):
    """The best validation of a run."""

    metric: str
    """The compared metric: the metric of the goal, or "loss" if the goal's metric was not measured."""
    value: float
    """The value of the metric, without smoothing."""
    step: int
    row: int
    """The row of the validation in `RunFiles.validations`."""
    lowest: bool
    """Whether a lower value is better."""

    @property
    def rank(self) -> float:
        """A number that is lower for a better value."""
        return self.value if self.lowest else -self.value

    def __str__(self) -> str:
        return f"{self.metric} {figure(self.metric, self.value)}"


@dataclass(frozen=True)
class RunFiles:
    """The content of the files of a run.

    Attributes:
        name: the part of the path in which the run differs from the other runs.
        config: the values of config.json by their dotted keys; empty if it cannot be read. The config of a run from
            Python lacks most sections.
        result: the content of result.json; empty if there is no such file.
        status: "running", "done", "stopped" (by early stopping), "preempted", "interrupted" or "failed"; "ended" if
            the run ended without a result, and "unknown" if the file system does not show whether the run is active.
        goal: the metric by which the run compares its validations, and its direction.
        faults: a line for each missing or damaged file, whose content is omitted.
    """

    directory: Path
    name: str
    config: Mapping[str, Any]
    series: Series
    result: Mapping[str, Any]
    status: str
    faults: tuple[str, ...] = ()
    goal: Goal = field(default_factory=Goal)

    @property
    def batch_size(self) -> int | None:
        """The global batch size; None if it is unknown."""
        size = self.config.get("train.batch_size")
        return size if isinstance(size, int) and size > 0 else None

    @property
    def is_done(self) -> bool:
        """Whether the run is done, or early stopping has ended it. A mean over runs counts no others."""
        return self.status in ("done", "stopped")

    @property
    def step(self) -> int:
        """The last known step."""
        final = self.result.get("step")
        logged = [int(columns["step"][-1]) for columns in self.series if columns]
        return max([final if isinstance(final, int) else 0, *logged])

    @cached_property
    def _planned(self) -> Duration | None:
        with suppress(InputError, KeyError, TypeError):
            return Duration.parse(self.config["train.duration"])
        return None

    @property
    def planned_epochs(self) -> float:
        """The planned number of epochs; infinite if the length is unknown or in another unit."""
        return float(self._planned.amount) if self._planned and self._planned.unit == "epochs" else math.inf

    @cached_property
    def total_steps(self) -> int | None:
        """The planned number of steps; None if it is unknown."""
        train, size = self.series.train, self.batch_size
        if self._planned is None or size is None:
            return None
        # The number of examples follows from the steps and epochs of the last logged row.
        with suppress(KeyError, ValueError, ArithmeticError):
            num_examples = round(int(train["step"][-1]) * size / float(train["epoch"][-1]))
            return self._planned.steps(num_examples=num_examples, batch_size=size)
        return None

    @cached_property
    def seconds(self) -> np.ndarray | None:
        """Training time at each logged step in seconds, float64[n], without start, evaluation and saving.

        The time is computed from the logged images per second. It is None if the batch size is unknown.
        """
        train = self.series.train
        if self.batch_size is None or "images_per_second" not in train:
            return None
        images = np.maximum(np.diff(train["step"], prepend=0), 0) * self.batch_size
        speed = train["images_per_second"]
        return np.cumsum(np.divide(images, speed, out=np.zeros(len(images)), where=speed > 0))

    def positions(self, columns: Columns) -> dict[str, np.ndarray]:
        """Return the x values of rows, float64[n], on the known axes among "step", "epoch" and "time" (seconds)."""
        values = {name: np.asarray(columns[name], np.float64) for name in ("step", "epoch") if name in columns}
        if self.seconds is not None and values:
            steps = np.concatenate([[0], self.series.train["step"]])
            values["time"] = np.interp(values["step"], steps, np.concatenate([[0.0], self.seconds]))
        return values

    @property
    def duration(self) -> float | None:
        """Seconds of training and validation; None if they are unknown."""
        if self.seconds is None or not len(self.seconds):
            return None
        return float(self.seconds[-1] + (self.validation_seconds or 0.0))

    @property
    def validation_seconds(self) -> float | None:
        """Seconds of all validations; None if they are unknown."""
        seconds = [part["seconds"] for part in (self.series.val, self.series.val_ema) if "seconds" in part]
        return float(sum(map(np.nansum, seconds))) if seconds else None

    @cached_property
    def validations(self) -> Columns:
        """The columns of `series.val`, and the metrics of averaged parameters, such as "val_ema loss"."""
        val, averaged = self.series.val, self.series.val_ema
        if not val or not averaged:
            return val
        row_of = {step: row for row, step in enumerate(averaged["step"].tolist())}
        rows = np.array([row_of.get(step, -1) for step in val["step"].tolist()])
        columns = {f"{VAL_EMA} {name}": column for name, column in averaged.items() if name not in NOT_MEASURED}
        return val | {name: np.where(rows < 0, np.nan, column[rows]) for name, column in columns.items()}

    @property
    def metrics(self) -> list[str]:
        """The names of the validation metrics."""
        return [name for name in self.validations if name not in NOT_MEASURED]

    @cached_property
    def best(self) -> Best | None:
        """The best validation by the goal's metric, or by the loss if the goal's metric was not measured.

        Among several equal validations, it is the latest.
        """
        val = self.validations
        for goal in (self.goal, Goal("loss", lowest=True)):
            measured = val.get(goal.metric, np.zeros(0))
            if rows := np.flatnonzero(np.isfinite(measured)).tolist():
                row = rows[goal.best(goal.values(measured[rows].tolist()))]
                return Best(goal.metric, float(measured[row]), int(val["step"][row]), row, goal.lowest)
        return None


def is_run(directory: Path) -> bool:
    """Return whether a directory is the work directory of a run."""
    # `isfile` is also false for a directory that is not readable.
    if os.path.isfile(directory / METRICS):
        return True
    # The config.json of another program has other keys.
    config, _ = json_object(directory / CONFIG_FILE)
    return "seed" in config and "data" in config


def read_runs(directories: Sequence[Path]) -> list[RunFiles]:
    """Read the runs of some work directories. Raises: InputError if one is no work directory or is given twice."""
    places = [directory.resolve() for directory in directories]
    for directory, place in zip(directories, places, strict=True):
        if not is_run(place):
            problem = f"{directory}: not the work directory of a run, which contains {CONFIG_FILE} and {METRICS}"
            raise InputError(problem, advice="give one that a run wrote into")
        if places.count(place) > 1:
            raise InputError(f"{directory}: is given twice; give each run once")
    return [_read(place, name) for place, name in zip(places, _names(places), strict=True)]


def _names(places: Sequence[Path]) -> list[str]:
    """Return the paths without the first folders that all paths have in common."""
    common = Path(os.path.commonpath([place.parent for place in places]))
    # The page must be valid UTF-8, but a path may contain other bytes.
    return [os.fsencode(place.relative_to(common)).decode(errors="replace") for place in places]


def _read(directory: Path, name: str) -> RunFiles:
    config, config_fault = json_object(directory / CONFIG_FILE)
    result, result_fault = json_object(directory / RESULT) if (directory / RESULT).exists() else ({}, "")
    try:
        validations = ValidationFile(directory / CHECKPOINTS, None)
    except InputError:
        validations = None
    columns, rows_fault = _series(directory, validations)
    faults = [f"{config_fault}; its settings and its time are left out"] if config_fault else []
    faults += [rows_fault] if rows_fault else []
    faults += [f"{result_fault}; its status is left out"] if result_fault else []
    status, saved = {True: "running", False: "ended", None: "unknown"}[is_locked(directory)], result.get("status")
    if status != "running" and isinstance(saved, str):
        status = saved
    goal = validations.goal if validations else Goal()
    return RunFiles(directory, name, flatten(config), columns, result, status, tuple(faults), goal)


def json_object(path: Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a file, and ""; an empty dict and the fault if the file cannot be read."""
    try:
        return files.parse_json(files.read(path), dict), ""
    except OSError as error:
        fault = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    except ValueError as error:
        fault = f"is damaged ({error})"
    return {}, f"{path.name} {fault}"


def _series(directory: Path, validations: ValidationFile | None) -> tuple[Series, str]:
    """Return the rows of metrics.jsonl, and a fault or ""."""
    try:
        rows = [row for _, row in parse(directory / METRICS)]
    except InputError as error:
        is_missing = not (directory / METRICS).exists()
        fault = f"{METRICS} is missing" if is_missing else str(error).removeprefix(f"{directory}/")
        return series(()), f"{fault}; its curves are left out"
    columns, losses = series(rows), {row["step"]: row.get("loss") for row in rows if row["split"] == VAL}
    if columns.train and (np.diff(columns.train["step"]) < 0).any():
        return columns, f"{METRICS} goes back to earlier steps; more than one run wrote into it"
    for step, metrics in validations.by_step.items() if validations else ():
        if (loss := metrics.get("loss")) is not None and losses.get(step, loss) != loss:
            both = f"{METRICS} and {VALIDATION_FILE}"
            return columns, f"{both} have different losses for step {step}; one of them belongs to another run"
    return columns, ""
