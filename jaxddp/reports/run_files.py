"""What the files of a work directory say of a run. They are read alone: without JAX, and while the run goes on."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError
from jaxddp.core.wording import show
from jaxddp.recipe_file import CONFIG_FILE
from jaxddp.sections.goal import VAL_EMA, Goal, by_split
from jaxddp.training.checkpoints.integrity import CHECKPOINTS
from jaxddp.training.checkpoints.validation_file import VALIDATION_FILE, ValidationFile
from jaxddp.training.listeners.jsonl import METRICS, RESULT
from jaxddp.training.listeners.metric_rows import Columns, Series, parse, series
from jaxddp.workdir.lock import is_locked

NOT_MEASURED = ("step", "epoch", "count", "seconds")
"""What a line of a validation holds beside its metrics."""


class Best(NamedTuple):
    """The best validation of a run."""

    metric: str
    """What it is the best by: the goal's, "top1" by default, or "loss" where that was not measured."""
    value: float
    """Of that metric, not smoothed."""
    step: int
    row: int
    """Its row among the validations."""


@dataclass(frozen=True)
class RunFiles:
    """A run, as far as its files tell.

    Attributes:
        name: what tells it from the runs beside it.
        config: config.json; empty where it cannot be read, and without most sections where the run came from Python.
        result: result.json; empty where there is none.
        status: "running", "done", "stopped" (without gain), "preempted", "interrupted" or "failed"; "ended" where a
            run did so without a word, and "unknown" where the directory is not locked while a run is at work.
        goal: by what the run compares its validations.
        faults: a line for each file that is missing or damaged, whose part is left out.
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
        """The global batch size; None where it is not known."""
        train = self.config.get("train")
        size = train.get("batch_size") if isinstance(train, dict) else None
        return size if isinstance(size, int) and size > 0 else None

    @property
    def step(self) -> int:
        """The last one that is known of."""
        told = self.result.get("step")
        logged = [int(columns["step"][-1]) for columns in self.series if columns]
        return max([told if isinstance(told, int) else 0, *logged])

    @cached_property
    def asked_epochs(self) -> float:
        """How many epochs the run is to have; infinite where its length is another one, or not known."""
        try:
            duration = Duration.parse(self.config["train"]["duration"])
            return float(duration.amount) if duration.unit == "epochs" else math.inf
        except (InputError, KeyError, TypeError, AttributeError):
            return math.inf

    @cached_property
    def total_steps(self) -> int | None:
        """How many steps the run is to have; None where that is not known."""
        try:
            duration = Duration.parse(self.config["train"]["duration"])
            # An epoch is as many steps as it takes to be one epoch further.
            steps, epochs = self.series.train["step"][-1], self.series.train["epoch"][-1]
            batch_size = self.config["train"]["batch_size"]
            num_examples = round(steps * batch_size / epochs)
            return duration.steps(num_examples=num_examples, batch_size=batch_size)
        except (InputError, KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError):
            return None

    @cached_property
    def seconds(self) -> np.ndarray | None:
        """Training time at each logged step, float64[n]: without evaluation, saving and the start.

        It is the sum of what the steps took at the images a second that were logged of them. None where the batch size
        is not known.
        """
        train = self.series.train
        if self.batch_size is None or "images_per_second" not in train:
            return None
        images = np.maximum(np.diff(train["step"], prepend=0), 0) * self.batch_size
        speed = train["images_per_second"]
        return np.cumsum(np.divide(images, speed, out=np.zeros(len(images)), where=speed > 0))

    def positions(self, columns: Columns) -> dict[str, np.ndarray]:
        """Where rows of this run lie on each axis, float64[n] by "step", "epoch" and "time" (seconds); those known."""
        found = {name: np.asarray(columns[name], np.float64) for name in ("step", "epoch") if name in columns}
        if self.seconds is not None and found:
            steps = np.concatenate([[0], self.series.train["step"]])
            found["time"] = np.interp(found["step"], steps, np.concatenate([[0.0], self.seconds]))
        return found

    @property
    def duration(self) -> float | None:
        """Seconds of training and of validation; None where they are not known."""
        if self.seconds is None or not len(self.seconds):
            return None
        return float(self.seconds[-1] + (self.validation_seconds or 0.0))

    @property
    def validation_seconds(self) -> float | None:
        """Those of all validations together; None where they are not known."""
        known = [each["seconds"] for each in (self.series.val, self.series.val_ema) if "seconds" in each]
        return float(np.nansum(np.concatenate(known))) if known else None

    @cached_property
    def validations(self) -> Columns:
        """The rows of `series.val`, with the metrics of averaged parameters as "val_ema loss" and so on."""
        val, averaged = self.series.val, self.series.val_ema
        if not val or not averaged:
            return val
        row_of = {step: row for row, step in enumerate(averaged["step"].tolist())}
        rows = np.array([row_of.get(step, -1) for step in val["step"].tolist()])
        names = [name for name in averaged if name not in NOT_MEASURED]
        return val | {f"{VAL_EMA} {name}": np.where(rows < 0, np.nan, averaged[name][rows]) for name in names}

    @property
    def metrics(self) -> list[str]:
        """What validation measured."""
        return [name for name in self.validations if name not in NOT_MEASURED]

    @cached_property
    def best(self) -> Best | None:
        """The best validation by the goal, of equal ones the latest; by the lowest loss where that was not measured."""
        val = self.validations
        for goal in (self.goal, Goal("loss", lowest=True)):
            measured = val.get(goal.metric, np.zeros(0))
            rows = np.flatnonzero(np.isfinite(measured)).tolist()
            if rows:
                row = rows[goal.best(goal.values(measured[rows].tolist()))]
                return Best(goal.metric, float(measured[row]), int(val["step"][row]), row)
        return None


def is_run(directory: Path) -> bool:
    """Whether a run wrote into a directory. A config.json alone may be another program's."""
    # It says no of what may not be looked at.
    if os.path.isfile(directory / METRICS):
        return True
    config, _ = _object(directory / CONFIG_FILE)
    return "seed" in config and "data" in config


def read_runs(directories: Sequence[Path]) -> list[RunFiles]:
    """The runs of some work directories. Raises: InputError; one is none, or is given twice."""
    places = [directory.resolve() for directory in directories]
    for directory, place in zip(directories, places, strict=True):
        if not is_run(place):
            raise InputError(
                f"{directory}: no work directory of a run, which has {CONFIG_FILE} and {METRICS}; give one that a run "
                "wrote into"
            )
        if places.count(place) > 1:
            raise InputError(f"{directory}: is given twice; give each run once")
    return [_read(place, name) for place, name in zip(places, _names(places), strict=True)]


def _names(places: Sequence[Path]) -> list[str]:
    """The ends of the paths, without the folders that all have in common."""
    parts = [place.parts for place in places]
    shortest = min(map(len, parts)) - 1
    common = next((i for i in range(shortest) if len({path[i] for path in parts}) > 1), shortest)
    # A name need not be UTF-8, and a page has to be.
    return [os.fsencode("/".join(path[common:])).decode(errors="replace") for path in parts]


def _read(directory: Path, name: str) -> RunFiles:
    config, of_config = _object(directory / CONFIG_FILE)
    result, of_result = _object(directory / RESULT)
    columns, of_rows = _series(directory)
    faults = []
    if of_config is not None:
        faults.append(f"{of_config}; its settings and its time are left out")
    if (of_rows := of_rows or _other_losses(directory, columns.val)) is not None:
        faults.append(of_rows)
    if of_result is not None and (directory / RESULT).exists():
        faults.append(f"{of_result}; how it ended is left out")
    ended = result.get("status")
    status = {True: "running", False: "ended", None: "unknown"}[is_locked(directory)]
    if status != "running" and isinstance(ended, str):
        status = ended
    return RunFiles(directory, name, config, columns, result, status, tuple(faults), _goal(directory))


def _object(path: Path) -> tuple[dict[str, Any], str | None]:
    """A file that holds a JSON object, and None; or nothing, and why."""
    try:
        content = json.loads(files.read(path))
    except FileNotFoundError:
        return {}, f"{path.name} is missing"
    except OSError as error:
        return {}, f"{path.name} cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        return {}, f"{path.name} is damaged ({error})"
    return (content, None) if isinstance(content, dict) else ({}, f"{path.name} is damaged (it holds {show(content)})")


def _other_losses(directory: Path, val: Columns) -> str | None:
    """What is wrong where checkpoints were validated with other losses than metrics.jsonl has of their steps."""
    try:
        known = ValidationFile(directory / CHECKPOINTS, None)
    except InputError:
        return None
    losses = dict(zip(val["step"].tolist(), val["loss"].tolist(), strict=True)) if "loss" in val else {}
    for step in known.steps:
        loss = known.of(step).get("loss")
        if loss is not None and losses.get(step, loss) != loss:
            return f"{METRICS} and {VALIDATION_FILE} have other losses of step {step}; one of them is another run's"
    return None


def _goal(directory: Path) -> Goal:
    """By what the run compares its validations, as far as it says so."""
    try:
        return ValidationFile(directory / CHECKPOINTS, None).goal
    except InputError:
        return Goal()


def _series(directory: Path) -> tuple[Series, str | None]:
    """What metrics.jsonl holds; without it what validation measured of the checkpoints, and why."""
    path = directory / METRICS
    try:
        found = series(row for _, row in parse(path))
        if found.train and (np.diff(found.train["step"]) < 0).any():
            return found, f"{METRICS} goes back to earlier steps; more than one run wrote into it"
        return found, None
    except InputError as error:
        told = str(error).removeprefix(f"{directory}/") if path.exists() else f"{METRICS} is missing"
    try:
        known = ValidationFile(directory / CHECKPOINTS, None)
    except InputError:
        return series([]), f"{told}; its curves are left out"
    rows = [
        {"step": step, "split": split, **metrics}
        for step in known.steps
        for split, metrics in by_split(known.of(step)).items()
    ]
    return series(rows), f"{told}; its curves are left out, but for what validation measured of checkpoints"
