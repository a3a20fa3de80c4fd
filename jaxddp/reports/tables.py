"""Tables of runs: progress, speed, the settings in which they differ, and the spread of metrics over their seeds.

The runs may still be training. A damaged file of a work directory is a fault of its run.
"""

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxddp.core.errors as wording
import jaxddp.core.files as files
from jaxddp.config import Config
from jaxddp.config.goal import VAL, VAL_EMA, Goal
from jaxddp.config.values import flatten
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, counted, duration, measure
from jaxddp.recipe.file import REFERENCE_FILE, RUN_ID, Reference
from jaxddp.recipe.sources import CONFIG_FILE
from jaxddp.training.checkpoints.integrity import CHECKPOINTS, VALIDATION_FILE, ValidationFile
from jaxddp.training.events import NOT_MEASURED, Columns, Series
from jaxddp.training.listeners.jsonl import ENDED, METRICS, RESULT, parse, series
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
        return measure(self.metric, self.value)


@dataclass(frozen=True)
class RunFiles:
    """The content of the files of a run.

    Attributes:
        name: the part of the path in which the run differs from the other runs.
        config: the values of config.json by their dotted keys; empty if it cannot be read. The config of a run from
            Python lacks most sections.
        result: the content of result.json; empty if there is no such file.
        status: "running", "done", "stopped" (early), "preempted", "interrupted" or "failed"; "ended" if
            the run ended without a result, and "unknown" if the file system does not show whether the run is active.
        goal: the metric by which the run compares its validations, and its direction.
        faults: a line for each missing or damaged file, whose content is omitted.
        reference: the published result of the run's recipe.
    """

    directory: Path
    name: str
    config: Mapping[str, Any]
    series: Series
    result: Mapping[str, Any]
    status: str
    faults: tuple[str, ...] = ()
    goal: Goal = field(default_factory=Goal)
    reference: Reference | None = None

    @property
    def batch_size(self) -> int | None:
        """The global batch size; None if it is unknown."""
        size = self.config.get("train.batch_size")
        return size if isinstance(size, int) and size in range(1, 1 << 31) else None

    @property
    def is_done(self) -> bool:
        """Whether the run is done, or it was stopped early. A mean over runs counts no others."""
        return self.status in ENDED

    @property
    def step(self) -> int:
        """The last known step."""
        final = self.result.get("step")
        logged = [int(columns["step"][-1]) for columns in self.series if columns]
        return max([final if isinstance(final, int) else 0, *logged])

    @cached_property
    def _planned(self) -> Duration | None:
        with suppress(InputError, KeyError, AttributeError):
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
        return None if self.seconds is None else float(self.seconds[-1] + (self.validation_seconds or 0.0))

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
    # `isfile` is also false for a directory that is not readable. The config.json of another program has other keys.
    return os.path.isfile(directory / METRICS) or {"seed", "data"} <= json_object(directory / CONFIG_FILE)[0].keys()


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
    validations = None
    with suppress(InputError):
        validations = ValidationFile(directory / CHECKPOINTS, None)
    columns, rows_fault = _series(directory, validations)
    config_fault = config_fault and f"{config_fault}; its settings and its time are left out"
    result_fault = result_fault and f"{result_fault}; its status is left out"
    faults = tuple(filter(None, (config_fault, rows_fault, result_fault)))
    status = {True: "running", False: "ended", None: "unknown"}[is_locked(directory)]
    if status != "running" and isinstance(result.get("status"), str):
        status = result["status"]
    goal, reference = validations.goal if validations else Goal(), None
    with suppress(InputError, TypeError):
        reference = Reference(**json_object(directory / REFERENCE_FILE)[0])
    return RunFiles(directory, name, flatten(config), columns, result, status, faults, goal, reference)


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
        fault = f"{METRICS} is missing" if is_missing else str(error).removeprefix(wording.on_screen(f"{directory}/"))
        return series(()), f"{fault}; its curves are left out"
    columns, losses = series(rows), {row["step"]: row.get("loss") for row in rows if row["split"] == VAL}
    if columns.train and (np.diff(columns.train["step"]) < 0).any():
        return columns, f"{METRICS} goes back to earlier steps; more than one run wrote into it"
    for step, metrics in validations.by_step.items() if validations else ():
        if (loss := metrics.get("loss")) is not None and losses.get(step, loss) != loss:
            both = f"{METRICS} and {VALIDATION_FILE}"
            return columns, f"{both} have different losses for step {step}; one of them belongs to another run"
    return columns, ""


NOTHING = "-"
_SHARES = ("data_wait_fraction", "flops_utilization")  # Logged values of a step that are shares from 0 to 1.
_FORMATS: dict[str, Callable[[float], str]] = dict.fromkeys(_SHARES, "{:.1%}".format)
_FORMATS |= {"peak_memory": wording.size, "images_per_second": wording.speed}
UNKNOWN = "unknown"
_DEEPEST = 5
_FREE = ("seed", "data.path", "data.name", "data.data_dir", "data.local_cache", "parallel.", "log.", "checkpoint.")
_FREE += ("data.verify", "data.manifest", "data.workers", "eval.batch_size", "recipe.file", "objects.jax", RUN_ID)
"""Prefixes of the keys in which runs of one recipe may differ: devices, location of the data, logging."""
_RECIPE = ("parallel.reproducible", "parallel.groups")
_RECIPE += ("checkpoint.best", "checkpoint.best_is", "checkpoint.best_smoothing")
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
            last = measure(metric, number(metric, float(run.validations[metric][-1])))
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
        cells = [_median(run, name) for name in ("images_per_second", *_SHARES)]
        # The last validation, which may need the most memory, comes after the last logged step.
        peaks = [*run.series.train.get("peak_memory", ()), run.result.get("peak_memory")]
        known = [float(peak) for peak in peaks if isinstance(peak, int | float) and 0 <= peak < 2**63]
        cells.append(number("peak_memory", max(known, default=None)))
        counts = (run.result.get(name) for name in ("devices", "processes"))
        cells += [str(count) if isinstance(count, int) else NOTHING for count in counts]
        training = None if run.seconds is None else float(run.seconds[-1])
        cells += [duration(training), duration(run.validation_seconds)]
        rows.append((Cell(run.name, colour), *map(Cell, cells)))
    filled = [any(cell.text != NOTHING for cell in column) for column in zip(*rows, strict=True)]
    titles, *rows = (tuple(itertools.compress(row, filled)) for row in (titles, *rows))
    return TextTable(titles, rows)


def _median(run: RunFiles, metric: str) -> str:
    values = run.series.train.get(metric, np.zeros(0))
    return number(metric, float(np.nanmedian(values)) if np.isfinite(values).any() else None)


Settings = dict[str, tuple[str, ...]]
"""The texts of the values of settings, by key."""


def differences(runs: Sequence[RunFiles]) -> Settings:
    """Return the value in each run of the settings that differ between runs, in the order of a config."""
    configs, defaults = [run.config for run in runs], Config().flat()
    keys = dict.fromkeys([*defaults, *(key for config in configs for key in config if key != RUN_ID)])
    settings = {key: tuple(_text(key, config, defaults) for config in configs) for key in keys}
    return {key: values for key, values in settings.items() if len({*values} - {UNKNOWN}) > 1}


def changes(run: RunFiles) -> Settings:
    """Return the default value and the run's value of the settings of a run that are not the default."""
    defaults = Config().flat()
    settings = {key: value for key, value in run.config.items() if key == _HOOKS or not key.startswith(_NO_SETTINGS)}
    both = {key: (_text(key, defaults, {}), _text(key, settings, defaults)) for key in settings}
    return {key: values for key, values in both.items() if len({*values}) > 1}


def seed_groups(runs: Sequence[RunFiles]) -> list[tuple[int, ...]]:
    """Return groups of the numbers of runs, in the order of the runs. The runs of a group differ in their seed or fold.

    A run whose config cannot be read is a group of its own. A second run with the same seed and fold is in another
    group.
    """
    defaults, groups, seeds = Config().flat(), dict[Any, list[int]](), Counter[Any]()
    data_of_fold = dict[Any, Any]()
    for number, run in enumerate(runs):
        flat = run.config
        fold, _, folds = str(flat.get("data.fold") or flat.get("data.val_fold") or "").partition("/")
        # Each fold has images of its own.
        free = (*_FREE, "data.fold", "data.val_fold", "fingerprint.") if fold else _FREE
        keys = [key for key in sorted({*defaults, *flat}) if key in _RECIPE or not key.startswith(free)]
        recipe: Any = (folds, *((key, _text(key, flat, defaults)) for key in keys)) if flat else number
        if flat.get("train.sync_every") is not None and flat.get("parallel.groups") is None:
            # Each process is a group of devices.
            recipe = recipe, run.result.get("processes")
        # A fold of other data may have the same name.
        data = [(key, value) for key, value in flat.items() if key.startswith("fingerprint.")]
        recipe = recipe if data_of_fold.setdefault((recipe, fold), data) == data else (recipe, str(data))
        seed = recipe, str(flat.get("seed")), fold
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
    settings = [[f"{key.rpartition('.')[2]} {values[n]}" for key, values in naming[:3]] for n in range(len(firsts))]
    names = [", ".join(each) + more for each in settings]
    # Groups that repeat a seed, or that differ in further settings, have the same name.
    both = [f"{name}, {first.name}".removeprefix(", ") for name, first in zip(names, firsts, strict=True)]
    return [name if names.count(name) == 1 else longer for name, longer in zip(names, both, strict=True)]


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
    """A group of runs that differ in their seed or fold alone. The members are the numbers of the runs."""

    name: str
    colour: str
    members: tuple[int, ...]


class Estimate(NamedTuple):
    """The mean of a metric over runs.

    Attributes:
        deviation: the standard deviation over the runs (ddof 1); NaN if it is unknown.
        images: the number of validation images of a run; 0 if it is unknown.
    """

    metric: str
    mean: float
    deviation: float = math.nan
    runs: int = 1
    images: int = 0

    @classmethod
    def of(cls, metric: str, values: Sequence[float], images: float = 0) -> "Estimate":
        """Return the mean over at least one finite value."""
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        return cls(metric, float(np.mean(values)), deviation, len(values), int(np.nan_to_num(images)))

    @property
    def error(self) -> float:
        """The standard error of the mean: over the runs, or of a share of the images for a single run; else NaN."""
        is_of_images = is_share(self.metric) and "mean_class" not in self.metric  # That is a mean of shares of classes.
        if self.runs == 1 and self.images and is_of_images and 0 <= self.mean <= 1:
            return math.sqrt(self.mean * (1 - self.mean) / self.images)
        return self.deviation / math.sqrt(self.runs)

    def __str__(self) -> str:
        """Return "98.33 ± 0.29%", or "98.33%" if the standard error is unknown."""
        mean, error = number(self.metric, self.mean), number(self.metric, self.error)
        return mean if error == NOTHING else f"{mean.removesuffix('%')} ± {error}"

    def minus(self, other: "Estimate") -> str:
        """Describe the difference from another estimate, and whether it is more than two standard errors."""
        between = Estimate(self.metric, self.mean - other.mean, math.hypot(self.error, other.error))
        size = "more than" if abs(between.mean) > 2 * between.error else "not more than"
        size = f"{size} two standard errors" if between.error > 0 else "whose standard error is unknown"
        return f"a difference of {str(between).replace('%', ' points')}, {size}"


def comparisons(runs: Sequence[RunFiles], groups: Sequence[SeedGroup]) -> list[str]:
    """Return sentences about the last validations of groups of runs that are done.

    There is one for each published result, which is compared with the best group of its recipe, and one for the two
    best groups, if they have the same validation data.
    """
    ends, lines = list[tuple[Estimate, str, RunFiles]](), list[str]()
    for name, _, members in groups:
        done = [runs[member] for member in members]
        metric = done[0].goal.metric if done else ""
        if done and all(metric in run.metrics for run in done):
            values = [float(run.validations[metric][-1]) for run in done]
            end = Estimate.of(metric, values, done[0].validations.get("count", [0])[-1])
            what = f"{name} with" if len(groups) > 1 else "here"
            text = f"{what} {end} ({counted(end.runs, 'run')}, {end.images:,} images)"
            ends += [(end, text, done[0])] if math.isfinite(end.mean) else []
    ends.sort(key=lambda end: end[0].mean if end[2].goal.lowest else -end[0].mean)
    for reference in dict.fromkeys(run.reference for run in runs if run.reference):
        line = f"Published: {measure(reference.metric, str(reference))} after {reference.at}, {reference.source}"
        line += "" if reference.deviation else ", which states no spread"
        published = Estimate(reference.metric, reference.value, reference.deviation or 0, reference.runs or 1)
        own = [end for end in ends if end[2].reference == reference and end[0].metric.split()[-1] == reference.metric]
        if own:
            end, text, run = own[0]
            line += f"; {text} after {run.validations['epoch'][-1]:.3g} epochs, {end.minus(published)}"
        lines.append(f"{line}.")
    # Results on different images do not tell which recipe is better.
    if len(ends) > 1 and len({(end.metric, run.config.get("fingerprint.val")) for end, _, run in ends[:2]}) == 1:
        (best, text, _), (second, other, _) = ends[:2]
        metric = wording.metric_name(best.metric)
        lines.append(f"The two best recipes, {metric}: {text}, and {other}, {best.minus(second)}.")
    return lines


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
    """Return the mean of a validation metric over runs; None if they have no common step or one lacks the metric.

    A step at which a run's value is not finite is left out.
    """
    if not all(metric in run.validations for run in runs):
        return None
    # If a step has two validations, the last validation is used.
    finite = [np.flatnonzero(np.isfinite(run.validations[metric])) for run in runs]
    row_of = [
        dict(zip(run.series.val["step"][n].tolist(), n, strict=True)) for run, n in zip(runs, finite, strict=True)
    ]
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
    titles = ("runs", "metric", "validation", "n", "mean ± standard error", "standard deviation", "minimum", "maximum")
    rows = []
    metrics = dict.fromkeys(name for run in runs for name in run.metrics)
    for metric, moment, group in itertools.product(metrics, ("best", "last"), groups):
        measured = [(runs[n].validations[metric], runs[n].best) for n in group.members if metric in runs[n].metrics]
        values = [float(column[best.row if moment == "best" else -1]) for column, best in measured if best]
        if finite := [value for value in values if math.isfinite(value)]:
            over_runs = Estimate.of(metric, finite)
            numbers = (str(over_runs), *(number(metric, f) for f in (over_runs.deviation, min(finite), max(finite))))
            cells = wording.metric_name(metric), moment, str(len(finite)), *numbers
            rows.append((Cell(group.name, group.colour), *map(Cell, cells)))
    return TextTable(titles, rows, texts=3)
