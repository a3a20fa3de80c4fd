"""The metrics of a run as rows, in files of the work directory such as `metrics.jsonl`, and as a history in memory.

A file has the seconds of a step by process and phase, and its listener reports the process that makes the others wait.
"""

import json
import logging
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

import jaxddp.core.files as files
import jaxddp.training.events as events
from jaxddp.config.goal import VAL, VAL_EMA
from jaxddp.config.registry import LOGGERS
from jaxddp.config.values import checked
from jaxddp.core.errors import InputError, as_text, counted, measure, requires
from jaxddp.core.peers import Peers, Spent

METRICS, RESULT = "metrics.jsonl", "result.json"
ENDED = ("done", "stopped")
"""The statuses of a run that is at its end. A run with another status continues if it is started again."""
CURVES, PARAMETERS, CONFUSION = "curves.png", "parameters.txt", "confusion.csv"
Row = dict[str, Any]
EPOCH_PREFIX = "epoch_"


class RowListener(events.Listener):
    """A listener that receives a row for each logged step and each finished evaluation."""

    def step(self, record: events.StepRecord) -> None:
        self.log(step_row(record))

    def evaluation(self, record: events.EvaluationRecord) -> None:
        if record.final:
            self.log(evaluation_row(record), record.predictions)

    def log(self, row: Row, predictions: events.PredictedImages | None = None) -> None:
        """Handle a row. The row of an evaluation may have predictions."""
        raise NotImplementedError


class JsonLines(RowListener):
    """The logger of `metrics.jsonl`, a line for every logged step and finished evaluation, and of `result.json`.

    A line is passed to the operating system before the next step. A resumed run continues the file: lines after the
    restored step and an incomplete last line are removed, and all other lines stay. A run from step 0 replaces both
    files. Raises: InputError if a file cannot be read or written, or `metrics.jsonl` belongs to another run.
    """

    def __init__(self, directory: Path):
        self._metrics, self._result = directory / METRICS, directory / RESULT

    def start(self, run: events.RunStart) -> None:
        self._run = run
        files.create(self._metrics.parent)
        # If nothing more is trained or validated, the result of the run stays unchanged.
        with files.reading(self._result, "remove it"):
            self._previous_result = files.read(self._result) if run.start_step and self._result.exists() else b""
        files.remove(self._result)
        self._validations = {row["split"]: row for row in _rewind(self._metrics, run) if row["split"] != "train"}

    def log(self, row: Row, predictions: events.PredictedImages | None = None) -> None:
        self._previous_result, split = b"", row["split"]
        # A run may end after this line was written, and before the metrics were saved: it then validates again.
        if self._validations.get(split, {}).get("step") != row["step"]:
            files.append(self._metrics, encode(row))
        if split != "train":
            self._validations[split] = row

    def end(self, run: events.RunEnd) -> None:
        with suppress(ValueError, KeyError):  # Another program may have written the file.
            previous = files.parse_json(self._previous_result, dict)
            if run.status in ENDED and (previous["status"], previous["step"]) == (run.status, run.step):
                return files.replace(self._result, self._previous_result)
        machine = {"devices": self._run.devices, "processes": self._run.processes}
        result: Row = {"status": run.status, "step": run.step, **machine, VAL: None}
        for split, validation in ((VAL, run.validation), (VAL_EMA, run.averaged)):
            # If a resumed run ends before its next validation, the last validation is in the kept lines of the file.
            if validation := validation or self._validations.get(split):
                metrics = {name: value for name, value in validation.items() if name not in events.NOT_MEASURED}
                result[split] = {name: None if value is None else float(value) for name, value in metrics.items()}
                result[split]["count"] = int(validation.get("count") or 0)
        result |= {name: value for name, value in asdict(run.used).items() if value is not None}
        result |= {"reason": run.reason} if run.reason else {}
        files.replace(self._result, encode(result))


def step_row(record: events.StepRecord) -> Row:
    """Return the row of a logged step, without unknown values. At the end of an epoch it has also `epoch_loss`, …"""
    row = {"step": int(record.step), "epoch": record.epoch, "split": "train", **record.metrics}
    row |= {"learning_rate": record.learning_rate, "image_size": record.image_size}
    row |= {"images_per_second": record.images_per_second, "data_wait_fraction": record.data_wait_fraction}
    row |= {"flops_utilization": record.used.flops_utilization, "peak_memory": record.used.peak_memory}
    if (end := record.epoch_end) is not None:
        row |= {EPOCH_PREFIX + name: value for name, value in (*end.metrics.items(), ("seconds", end.seconds))}
    return _plain(row)


def evaluation_row(record: events.EvaluationRecord) -> Row:
    """Return the row of a finished evaluation."""
    row = {"step": int(record.step), "epoch": record.epoch, "split": record.split, **record.metrics}
    return _plain(row | {"count": int(record.seen), "seconds": record.seconds})


def _plain(row: Row) -> Row:
    """Return a row without unknown values, and with Python's numbers in place of NumPy's."""
    known = {name: value for name, value in row.items() if value is not None}
    return {name: value if isinstance(value, str | int) else float(value) for name, value in known.items()}


def scalars(row: Row) -> Row:
    """Return the numbers of a row by the names for loggers: `train/loss`, `train/epoch_top1`, `val/loss`, …"""
    return {f"{row['split']}/{name}": value for name, value in row.items() if name not in ("step", "split")}


def series(rows: Iterable[Row]) -> events.Series:
    """Return the columns of logged steps, finished epochs and evaluations."""
    rows = list(rows)
    train, val, val_ema = ([row for row in rows if row["split"] == split] for split in ("train", VAL, VAL_EMA))
    steps = [{name: value for name, value in row.items() if not name.startswith(EPOCH_PREFIX)} for row in train]
    ends = [
        {"step": row["step"], "epoch": row.get("epoch")}
        | {name.removeprefix(EPOCH_PREFIX): row[name] for name in row if name.startswith(EPOCH_PREFIX)}
        for row in train
        if EPOCH_PREFIX + "seconds" in row
    ]
    return events.Series(*map(_columns, (steps, ends, val, val_ema)))


def _columns(rows: list[Row]) -> events.Columns:
    names = dict.fromkeys(name for row in rows for name in row if name != "split")
    types = {"step": np.int64}
    return {name: np.array([row.get(name) for row in rows], types.get(name, np.float64)) for name in names}


def parse(path: Path) -> list[tuple[bytes, Row]]:
    """Return the lines of a `metrics.jsonl`, with their newline, and their rows.

    An incomplete last line, which a killed run may leave, is left out.

    Raises: InputError if the file cannot be read, or a line is not a row.
    """
    *lines, _incomplete = files.content_of(path, "give a run's metrics.jsonl").split(b"\n")
    return [(line + b"\n", _parse_line(path, number, line)) for number, line in enumerate(lines, 1)]


def encode(row: Row) -> bytes:
    """Return a row as a line of JSON with all digits of numbers, and `null` for a number that is not finite."""
    return (json.dumps(_finite(row), allow_nan=False) + "\n").encode()


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rewind(path: Path, run: events.RunStart) -> list[Row]:
    """Remove the lines after the run's first step from the file at `path`, and return the rows that stay.

    Raises: InputError if the rows have another loss for the last logged step than the checkpoint.
    """
    if run.start_step == 0 or not path.exists():
        files.replace(path, b"")
        return []
    kept = [(line, row) for line, row in parse(path) if row["step"] <= run.start_step]
    losses = {row["step"]: row.get("loss") for _, row in kept if row["split"] == "train"}
    if run.logged is not None:
        step, loss = run.logged["step"], _finite(run.logged["loss"])
        if losses.get(step, loss) != loss:
            problem = f"{path}: the loss of step {step} is {losses[step]}, and {loss} in the checkpoint"
            advice = "restore the run's own file, or move this one away to begin a new one"
            raise InputError(f"{problem}, so the file is of another run", advice=advice)
    content = b"".join(line for line, _ in kept)
    if len(content) != path.stat().st_size:
        files.replace(path, content)
    return [row for _, row in kept]


LOGGERS.add("jsonl")(lambda config, workdir: JsonLines(workdir))


def _parse_line(path: Path, number: int, line: bytes) -> Row:
    with suppress(ValueError, KeyError, TypeError):
        row = files.parse_json(line, dict)
        numbers = [value for name, value in row.items() if name != "split"]
        has_step = type(row["step"]) is int and 0 <= row["step"] < 2**63 and isinstance(row["split"], str)
        if has_step and all(value is None or isinstance(value, float) or abs(value) < 2**63 for value in numbers):
            return row
    problem = f"{path}:{number}: not a JSON object with a step and a split, and numbers"
    raise InputError(f"{problem}: {line[:60].decode(errors='replace').strip()!r}", advice="fix or remove the line")


class Curves(events.Listener):
    """A listener that draws `curves.png` from `metrics.jsonl`, so the curves of a resumed run are complete.

    In the list of listeners it must come after `JsonLines`. It draws at the end of the run, and after evaluations.
    Drawing takes at most a hundredth of the time. Raises: see `draw`.
    """

    def __init__(self, metrics: Path, picture: Path):
        # A drawing takes some tenths of a second, so a run of seconds is drawn at its end only.
        self._files, self._next_draw = (metrics, picture), time.monotonic() + 30

    def evaluation(self, record: events.EvaluationRecord) -> None:
        if record.final and (begin := time.monotonic()) >= self._next_draw:
            draw(*self._files)
            self._next_draw = begin + 100 * (time.monotonic() - begin)

    def end(self, run: events.RunEnd) -> None:
        draw(*self._files)


LOGGERS.add("curves")(lambda config, workdir: Curves(workdir / METRICS, workdir / CURVES))


def draw(metrics: Path, picture: Path) -> None:
    """Draw the curves of a `metrics.jsonl` into a PNG file. Raises: InputError if a file cannot be read or written."""
    # Imported here, so that the first step does not wait for matplotlib.
    from jaxddp.training.pictures import draw_and_free, figure, png

    files.replace(picture, draw_and_free(lambda: png(figure(series(row for _, row in parse(metrics))))))


class ParameterOverview(events.Listener):
    """A logger that writes `parameters.txt` at the start of a run. Raises: InputError if the file cannot be written."""

    def __init__(self, directory: Path):
        self._path = directory / PARAMETERS

    def start(self, run: events.RunStart) -> None:
        # Imported here, because only this logger needs clu.
        from clu import parameter_overview

        from jaxddp.models.interface import by_path

        table = parameter_overview.get_parameter_overview(by_path((), run.params), include_stats=False)
        files.create(self._path.parent)
        files.replace(self._path, (table + "\n").encode())


LOGGERS.add("parameters")(lambda config, workdir: ParameterOverview(workdir))


class ConfusionTable(events.Listener):
    """A logger of `confusion.csv`, written after each validation: a row for each class; the first field holds the step.

    A row holds the class, its accuracy (empty for a class without images), its number of images, and how many of them
    were predicted as each class. Raises: InputError if the file cannot be written.
    """

    wants_metrics = ("confusion",)

    def __init__(self, directory: Path, *, guard_formulas: bool = False):
        self._file, self._guard_formulas = directory / CONFUSION, guard_formulas

    def start(self, run: events.RunStart) -> None:
        self._names = tuple(map(as_text, run.class_names)) if self._guard_formulas else run.class_names
        files.create(self._file.parent)

    def evaluation(self, record: events.EvaluationRecord) -> None:
        if record.final and record.split == "val" and "confusion" in record.sets:
            # int[K, K], with labels in rows.
            matrix, header = record.sets["confusion"], (f"step {record.step}", "accuracy", "images", *self._names)
            counts = zip(self._names, matrix.tolist(), matrix.diagonal().tolist(), strict=True)
            rows = ([name, right / sum(row) if sum(row) else "", sum(row), *row] for name, row, right in counts)
            files.replace_csv(self._file, [header, *rows])


LOGGERS.add("confusion")(lambda config, workdir: ConfusionTable(workdir, guard_formulas=config.log.guard_formulas))


Part = Literal["train", "epochs", "val", "val_ema"]


class History(RowListener):
    """The metrics of a run: `history.train["loss"]`, `history.epochs["seconds"]`, `history.val["top1"]`.

    `history.val_ema` holds the metrics of averaged parameters. Each of these is a dict of arrays, which is empty if
    there are no rows; see `jaxddp.training.events.Series`. A notebook shows a history as its curves. A resumed run
    continues the history after the restored step, with the earlier rows of its metrics.jsonl; other runs start empty.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows = list(rows)

    @classmethod
    def read(cls, workdir: str | Path) -> "History":
        """Read the history from the metrics.jsonl of a work directory, whose run may still be training.

        Raises:
            InputError: there is no such file, it cannot be read, or a line is not a row of metrics.
        """
        path = Path(files.check_path(workdir, "workdir")) / METRICS
        if not path.exists():
            raise InputError(f"{path}: no such file; give the work directory of a run that was logged")
        return cls(row for _, row in parse(path))

    train = property(lambda self: series(self._rows).train, doc="The logged steps: an array for each column.")
    epochs = property(lambda self: series(self._rows).epochs, doc="The means of each epoch: an array for each column.")
    val = property(lambda self: series(self._rows).val, doc="The validations: an array for each column.")
    val_ema = property(lambda self: series(self._rows).val_ema, doc="The validations of averaged parameters.")

    def to_frame(self, part: Part | None = None) -> Any:
        """Return the metrics as a pandas DataFrame, in the order in which they were logged.

        Without `part` it has all rows, with the columns of metrics.jsonl: `step` (int64), `epoch`, `split` ("train",
        "val", …), `loss`, …; the means of an epoch begin with `epoch_`. With a part it has the columns of `train`,
        `epochs`, `val` or `val_ema`. Numbers are float64, NaN where a row has no value.

        Raises:
            InputError: `part` is not one of these names, or pandas is not installed.
        """
        with requires("history.to_frame()", "pandas", "pandas"):
            import pandas as pd
        if (part := checked(part, Part | None, "part")) is not None:
            return pd.DataFrame(getattr(self, part))
        columns = {"step": np.zeros(0, np.int64), "epoch": np.zeros(0)}
        return pd.DataFrame(columns | {"split": [row["split"] for row in self._rows]} | _columns(self._rows))

    def plot(self) -> Any:
        """Return the curves as a matplotlib Figure."""
        from jaxddp.training import pictures

        return pictures.figure(series(self._rows))

    def share(self, peers: Peers) -> None:
        """Copy the history of process 0, whose listeners are called, to all processes; all must call it together."""
        if not peers.is_alone:
            self._rows = peers.from_first("history", lambda: self._rows)

    def start(self, run: events.RunStart) -> None:
        if not self._rows and run.workdir is not None and (path := run.workdir / METRICS).exists():
            self._rows = [row for _, row in parse(path)]
        self._rows = [row for row in self._rows if row["step"] <= run.start_step] if run.start_step else []

    def log(self, row: Row, predictions: events.PredictedImages | None = None) -> None:
        # As in `JsonLines.log`, a repeated validation is left out.
        if all((one["step"], one["split"]) != (row["step"], row["split"]) for one in self._rows[-2:]):
            self._rows.append(row)

    def __repr__(self) -> str:
        columns, val = zip(("logged step", "epoch", "evaluation"), series(self._rows), strict=False), self.val
        counts = ", ".join(counted(len(rows.get("step", ())), noun) for noun, rows in columns)
        last = [measure(name, val[name][-1]) for name in ("loss", "top1") if name in val]
        return f"History({counts}{': val ' if last else ''}{', '.join(last)})"

    def _repr_png_(self) -> bytes | None:
        return self.plot()._repr_png_() if self._rows else None


FILE = "step_seconds.json"
"""The file of a work directory that holds the last comparison of a job's processes."""
_PHASES = ("input", "dispatch", "device", "save")
COLUMNS: tuple[str, ...] = (*_PHASES, "other")
"""The phases of a step; "other" is the sum of "training" and "listeners"."""
_SLOW_FACTOR, _MIN_STEP_SHARE = 1.5, 0.1
_MAX_ROWS = 8
COMPARISON_SECONDS = 30.0
"""Seconds between two comparisons: long enough that single slow steps do not matter."""
_LOG_SECONDS = 600.0
_log = logging.getLogger("jaxddp.training")


class SlowPhase(NamedTuple):
    """A process that is slower than others in a phase: its seconds per step, and the median of all processes."""

    process: int
    phase: str
    seconds: float
    median: float

    def __str__(self) -> str:
        times = f"{self.seconds / self.median:.1f} times the median" if self.median > 0 else "and the median is 0"
        return f"process {self.process} takes {self.seconds:.3g} s a step in phase {self.phase!r}, {times}"


@dataclass(frozen=True)
class StepSeconds:
    """The seconds per step of each process in each of `COLUMNS`, over the steps after `first` up to `last`."""

    first: int
    last: int
    seconds: Mapping[int, Mapping[str, float]]

    @classmethod
    def between(cls, before: Mapping[int, Spent], after: Mapping[int, Spent]) -> "StepSeconds | None":
        """Return the time spent between two measurements; None if a process made no step between them."""
        seconds = dict[int, Mapping[str, float]]()
        for process in sorted(after.keys() & before.keys()):
            (begin, earlier), (end, later) = before[process], after[process]
            if end <= begin:
                return None
            spent = {phase: (later[phase] - earlier.get(phase, 0.0)) / (end - begin) for phase in later}
            other = spent.get("training", 0.0) + spent.get("listeners", 0.0)
            seconds[process] = {phase: spent.get(phase, 0.0) for phase in _PHASES} | {"other": other}
        if not seconds:
            return None
        return cls(min(before[each][0] for each in seconds), max(after[each][0] for each in seconds), seconds)

    @property
    def medians(self) -> dict[str, float]:
        """The median of all processes in each column."""
        return {name: statistics.median_low(columns[name] for columns in self.seconds.values()) for name in COLUMNS}

    def slow(self) -> list[SlowPhase]:
        """Return the processes and phases that are slower than the median, the slowest first.

        A slow phase takes over 1.5 times the median, and the difference is over a tenth of a step. In the phase
        "device" all processes wait for the slowest one, so this phase is returned only if no other phase is slow.
        """
        step = max(sum(columns.values()) for columns in self.seconds.values())
        slow_phases = [
            SlowPhase(process, column, columns[column], median)
            for column, median in self.medians.items()
            for process, columns in self.seconds.items()
            if columns[column] > _SLOW_FACTOR * median and columns[column] - median > _MIN_STEP_SHARE * step
        ]
        on_host = [each for each in slow_phases if each.phase != "device"]
        return sorted(on_host or slow_phases, key=lambda each: each.median - each.seconds)

    def table(self) -> list[str]:
        """Return the lines of a table with the slowest processes, at most eight, and the median."""
        listed = sorted([*dict.fromkeys((*(each.process for each in self.slow()), *self.seconds))][:_MAX_ROWS])
        rows = {f"process {process}": self.seconds[process] for process in listed} | {"median": self.medians}
        title = f"{'':<14}" + "".join(f"{column:>10}" for column in COLUMNS)
        lines = [f"{name:<14}" + "".join(f"{row[column]:>10.4f}" for column in COLUMNS) for name, row in rows.items()]
        return [title, *lines]

    @classmethod
    def loads(cls, path: Path, content: bytes) -> "StepSeconds":
        """Parse the content of the file. Raises: InputError if the content is invalid."""
        with files.parsing(path, "remove it; the next run writes it again", "cannot be read"):
            entries = files.parse_json(content)
            seconds = {int(p): {column: float(c[column]) for column in COLUMNS} for p, c in entries["seconds"].items()}
            if not seconds:
                raise ValueError("it has no process")
            return cls(int(entries["first"]), int(entries["last"]), seconds)


class SlowProcesses(events.Listener):
    """A listener that compares the time of processes by phase. It logs a slow process, at most every ten minutes."""

    def __init__(self, peers: Peers):
        self._peers = peers

    def start(self, run: events.RunStart) -> None:
        self._file = None if run.workdir is None else run.workdir / FILE
        self._previous: Mapping[int, Spent] | None = None
        self._compared_at, self._logged_at = 0.0, dict[tuple[int, str], float]()

    def step(self, record: events.StepRecord) -> None:
        now = time.monotonic()
        if self._previous is not None and now - self._compared_at < COMPARISON_SECONDS:
            return
        spent = self._peers.spent()
        if self._previous is not None:
            if (difference := StepSeconds.between(self._previous, spent)) is None:
                return
            self._report(difference, now)
        self._previous, self._compared_at = spent, now

    def _report(self, spent: StepSeconds, now: float) -> None:
        if self._file is not None:
            # This file is optional. If the disk is full, writing a file that the run needs raises the error.
            with suppress(InputError):
                files.replace(self._file, encode(vars(spent)))
        # A slow process is named by its number and its phase.
        if slow := [each for each in spent.slow() if now - self._logged_at.get(each[:2], -math.inf) >= _LOG_SECONDS]:
            self._logged_at |= {each[:2]: now for each in slow}
            steps = f"seconds a step, from step {spent.first + 1:,} to {spent.last:,}:"
            _log.warning("\n".join([f"{slow[0]}; {steps}", *spent.table()]))
