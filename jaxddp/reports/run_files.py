"""The content of the work directories of runs, which may still be training; a damaged file is a fault of its run."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.goal import VAL_EMA, Goal, by_split
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError
from jaxddp.core.wording import show
from jaxddp.recipe.sources import CONFIG_FILE
from jaxddp.training.checkpoints.integrity import CHECKPOINTS
from jaxddp.training.checkpoints.validation_file import VALIDATION_FILE, ValidationFile
from jaxddp.training.listeners.jsonl import METRICS, RESULT, Columns, Series, parse, series
from jaxddp.workdir.lock import is_locked

NOT_MEASURED = ("step", "epoch", "count", "seconds")
"""Columns of a validation that are not metrics."""


class Best(NamedTuple):
    """The best validation of a run."""

    metric: str
    """The compared metric: the metric of the goal, or "loss" if the goal's metric was not measured."""
    value: float
    """The value of the metric, without smoothing."""
    step: int
    row: int
    """The row of the validation in `RunFiles.validations`."""


@dataclass(frozen=True)
class RunFiles:
    """The content of the files of a run.

    Attributes:
        name: the part of the path in which the run differs from the other runs.
        config: the content of config.json; empty if it cannot be read. The config of a run from Python lacks most
            sections.
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
        train = self.config.get("train")
        size = train.get("batch_size") if isinstance(train, dict) else None
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
    def planned_epochs(self) -> float:
        """The planned number of epochs; infinite if the length is unknown or in another unit."""
        try:
            duration = Duration.parse(self.config["train"]["duration"])
            return float(duration.amount) if duration.unit == "epochs" else math.inf
        except (InputError, KeyError, TypeError, AttributeError):
            return math.inf

    @cached_property
    def total_steps(self) -> int | None:
        """The planned number of steps; None if it is unknown."""
        try:
            duration = Duration.parse(self.config["train"]["duration"])
            # The number of examples follows from the steps and epochs of the last logged row.
            steps, epochs = self.series.train["step"][-1], self.series.train["epoch"][-1]
            batch_size = self.config["train"]["batch_size"]
            num_examples = round(steps * batch_size / epochs)
            return duration.steps(num_examples=num_examples, batch_size=batch_size)
        except (InputError, KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError):
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
        validations = (self.series.val, self.series.val_ema)
        seconds = [columns["seconds"] for columns in validations if "seconds" in columns]
        return float(np.nansum(np.concatenate(seconds))) if seconds else None

    @cached_property
    def validations(self) -> Columns:
        """The columns of `series.val`, and the metrics of averaged parameters, such as "val_ema loss"."""
        val, averaged = self.series.val, self.series.val_ema
        if not val or not averaged:
            return val
        row_of = {step: row for row, step in enumerate(averaged["step"].tolist())}
        rows = np.array([row_of.get(step, -1) for step in val["step"].tolist()])
        names = [name for name in averaged if name not in NOT_MEASURED]
        return val | {f"{VAL_EMA} {name}": np.where(rows < 0, np.nan, averaged[name][rows]) for name in names}

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
            rows = np.flatnonzero(np.isfinite(measured)).tolist()
            if rows:
                row = rows[goal.best(goal.values(measured[rows].tolist()))]
                return Best(goal.metric, float(measured[row]), int(val["step"][row]), row)
        return None


def is_run(directory: Path) -> bool:
    """Return whether a directory is the work directory of a run."""
    # `isfile` is also false for a directory that is not readable.
    if os.path.isfile(directory / METRICS):
        return True
    # The config.json of another program has other keys.
    config, _ = _object(directory / CONFIG_FILE)
    return "seed" in config and "data" in config


def read_runs(directories: Sequence[Path]) -> list[RunFiles]:
    """Read the runs of some work directories. Raises: InputError if one is no work directory or is given twice."""
    places = [directory.resolve() for directory in directories]
    for directory, place in zip(directories, places, strict=True):
        if not is_run(place):
            raise InputError(
                f"{directory}: not the work directory of a run, which contains {CONFIG_FILE} and {METRICS}; "
                "give one that a run wrote into"
            )
        if places.count(place) > 1:
            raise InputError(f"{directory}: is given twice; give each run once")
    return [_read(place, name) for place, name in zip(places, _names(places), strict=True)]


def _names(places: Sequence[Path]) -> list[str]:
    """Return the paths without the first folders that all paths have in common."""
    parts = [place.parts for place in places]
    shortest = min(map(len, parts)) - 1
    common = next((i for i in range(shortest) if len({path[i] for path in parts}) > 1), shortest)
    # The page must be valid UTF-8, but a path may contain other bytes.
    return [os.fsencode("/".join(path[common:])).decode(errors="replace") for path in parts]


def _read(directory: Path, name: str) -> RunFiles:
    config, config_fault = _object(directory / CONFIG_FILE)
    result, result_fault = _object(directory / RESULT)
    try:
        validations = ValidationFile(directory / CHECKPOINTS, None)
    except InputError:
        validations = None
    columns, rows_fault = _series(directory, validations)
    faults = []
    if config_fault is not None:
        faults.append(f"{config_fault}; its settings and its time are left out")
    if (rows_fault := rows_fault or _other_losses(validations, columns.val)) is not None:
        faults.append(rows_fault)
    if result_fault is not None and (directory / RESULT).exists():
        faults.append(f"{result_fault}; its status is left out")
    saved = result.get("status")
    status = {True: "running", False: "ended", None: "unknown"}[is_locked(directory)]
    if status != "running" and isinstance(saved, str):
        status = saved
    return RunFiles(
        directory, name, config, columns, result, status, tuple(faults), validations.goal if validations else Goal()
    )


def _object(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the JSON object in a file and None. If the file cannot be read, return an empty dict and the fault."""
    try:
        content = files.parse_json(files.read(path))
    except FileNotFoundError:
        return {}, f"{path.name} is missing"
    except OSError as error:
        return {}, f"{path.name} cannot be read ({error.strerror})"
    except ValueError as error:
        return {}, f"{path.name} is damaged ({error})"
    return (
        (content, None) if isinstance(content, dict) else ({}, f"{path.name} is damaged (it contains {show(content)})")
    )


def _other_losses(validations: ValidationFile | None, val: Columns) -> str | None:
    """Return a fault if metrics.jsonl and the validation file have different losses for a step; else None."""
    losses = dict(zip(val["step"].tolist(), val["loss"].tolist(), strict=True)) if "loss" in val else {}
    if validations is None:
        return None
    for step in validations.steps:
        loss = validations.of(step).get("loss")
        if loss is not None and losses.get(step, loss) != loss:
            both = f"{METRICS} and {VALIDATION_FILE}"
            return f"{both} have different losses for step {step}; one of them belongs to another run"
    return None


def _series(directory: Path, validations: ValidationFile | None) -> tuple[Series, str | None]:
    """Return the rows of metrics.jsonl and None. If it is unreadable, return the validation file's rows and a fault."""
    path = directory / METRICS
    try:
        columns = series(row for _, row in parse(path))
        if columns.train and (np.diff(columns.train["step"]) < 0).any():
            return columns, f"{METRICS} goes back to earlier steps; more than one run wrote into it"
        return columns, None
    except InputError as error:
        fault = str(error).removeprefix(f"{directory}/") if path.exists() else f"{METRICS} is missing"
    if validations is None:
        return series([]), f"{fault}; its curves are left out"
    rows = [
        {"step": step, "split": split, **metrics}
        for step in validations.steps
        for split, metrics in by_split(validations.of(step)).items()
    ]
    return series(rows), f"{fault}; its curves are left out, except for the validations of checkpoints"
