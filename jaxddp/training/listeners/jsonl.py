"""The metrics of a run as rows, in `metrics.jsonl`, a history and curves, and its end in `result.json`."""

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.config.goal import VAL, VAL_EMA
from jaxddp.config.registry import LOGGERS
from jaxddp.core.errors import InputError
from jaxddp.training.events import EvaluationRecord, Listener, PredictedImages, RunEnd, RunStart, StepRecord

METRICS = "metrics.jsonl"
RESULT = "result.json"
Row = dict[str, Any]
Columns = dict[str, np.ndarray]
EPOCH_PREFIX = "epoch_"
_NO_METRICS = ("step", "epoch", "split", "count", "seconds")


class Series(NamedTuple):
    """The rows of a run as columns, each float64[n] (`step` is int64[n]); NaN where a row has no value."""

    train: Columns
    """Logged steps: `step`, `epoch` (position in the run, in epochs), `loss`, `top1`, `learning_rate`, …"""
    epochs: Columns
    """Finished epochs: `step`, `epoch`, and the means over the epoch's examples: `loss`, `top1`, …; `seconds`."""
    val: Columns
    """Finished evaluations: `step`, `epoch`, `loss`, `top1`, …; `count` (examples), `seconds`."""
    val_ema: Columns
    """Like `val`, for averaged parameters."""


class RowListener(Listener):
    """A listener that receives a row for each logged step and each finished evaluation."""

    def step(self, record: StepRecord) -> None:
        self.log(step_row(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        if record.final:
            self.log(evaluation_row(record), record.predictions)

    def log(self, row: Row, predictions: PredictedImages | None = None) -> None:
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

    def start(self, run: RunStart) -> None:
        self._run = run
        files.create(self._metrics.parent)
        # If nothing more is trained or validated, the result of the run stays unchanged.
        self._previous_result = None
        if run.start_step and self._result.exists():
            with files.reading(self._result, "remove it"):
                self._previous_result = files.read(self._result)
        files.remove(self._result)
        kept = _rewind(self._metrics, run)
        self._validations = {row["split"]: row for row in kept if row["split"] != "train"}

    def log(self, row: Row, predictions: PredictedImages | None = None) -> None:
        self._previous_result, split = None, row["split"]
        # If a run ends after this line of a validation was written, but before its metrics were saved with the
        # checkpoint, the resumed run validates again. The line must not be written twice.
        if self._validations.get(split, {}).get("step") != row["step"]:
            files.append(self._metrics, encode(row))
        if split != "train":
            self._validations[split] = row

    def end(self, run: RunEnd) -> None:
        if self._previous_result is not None and run.status in ("done", "stopped"):
            files.replace(self._result, self._previous_result)
            return
        result: Row = {"status": run.status, "step": run.step}
        result |= {"devices": self._run.devices, "processes": self._run.processes, VAL: None}
        for split, validation in ((VAL, run.validation), (VAL_EMA, run.averaged)):
            # If a resumed run ends before its next validation, the last validation is in the kept lines of the file.
            if validation := validation or self._validations.get(split):
                metrics = {name: value for name, value in validation.items() if name not in _NO_METRICS}
                metrics = {name: None if value is None else float(value) for name, value in metrics.items()}
                result[split] = metrics | {"count": int(validation.get("count") or 0)}
        result |= {name: value for name, value in asdict(run.used).items() if value is not None}
        result |= {"reason": run.reason} if run.reason else {}
        files.replace(self._result, encode(result))


def step_row(record: StepRecord) -> Row:
    """Return the row of a logged step, without unknown values. At the end of an epoch it has also `epoch_loss`, …"""
    row = {"step": int(record.step), "epoch": record.epoch, "split": "train", **record.metrics}
    row |= {"learning_rate": record.learning_rate, "image_size": record.image_size}
    row |= {"images_per_second": record.images_per_second, "data_wait_fraction": record.data_wait_fraction}
    row |= {"flops_utilization": record.used.flops_utilization, "peak_memory": record.used.peak_memory}
    if (end := record.epoch_end) is not None:
        row |= {EPOCH_PREFIX + name: value for name, value in (*end.metrics.items(), ("seconds", end.seconds))}
    return _plain(row)


def evaluation_row(record: EvaluationRecord) -> Row:
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


def series(rows: Iterable[Row]) -> Series:
    """Return the columns of logged steps, finished epochs and evaluations."""
    rows, ends = list(rows), []
    train = [row for row in rows if row["split"] == "train"]
    steps = [{name: value for name, value in row.items() if not name.startswith(EPOCH_PREFIX)} for row in train]
    for row in train:
        if EPOCH_PREFIX + "seconds" in row:
            means = {name: value for name, value in row.items() if name.startswith(EPOCH_PREFIX)}
            named = {name.removeprefix(EPOCH_PREFIX): value for name, value in means.items()}
            ends.append({"step": row["step"], "epoch": row.get("epoch")} | named)
    evaluations = (_columns([row for row in rows if row["split"] == split]) for split in (VAL, VAL_EMA))
    return Series(_columns(steps), _columns(ends), *evaluations)


def table(rows: list[Row]) -> Columns:
    """Return all rows as columns: `step` int64[n], `epoch`, `split` (strings), and every other name of a row."""
    columns = {"step": np.zeros(0, np.int64), "epoch": np.zeros(0)}
    return columns | {"split": np.array([row["split"] for row in rows], object)} | _columns(rows)


def _columns(rows: list[Row]) -> Columns:
    names = dict.fromkeys(name for row in rows for name in row if name != "split")
    types = {"step": np.int64}
    return {name: np.array([row.get(name) for row in rows], types.get(name, np.float64)) for name in names}


def is_wide(parts: Iterable[Columns]) -> bool:
    """Return whether the positive losses span a factor of more than 100, too much for a linear axis."""
    losses = np.concatenate([np.zeros(0), *(columns["loss"] for columns in parts if "loss" in columns)])
    losses = losses[(losses > 0) & np.isfinite(losses)]
    return bool(losses.size and losses.max() > 100 * losses.min())


def parse(path: Path) -> list[tuple[bytes, Row]]:
    """Return the lines of a `metrics.jsonl`, with their newline, and their rows.

    An incomplete last line, which a killed run may leave, is left out.

    Raises:
        InputError: the file cannot be read, or a line is not a row.
    """
    with files.reading(path, "give a run's metrics.jsonl"):
        *lines, _incomplete = files.read(path).split(b"\n")
    return [(line + b"\n", _parse_line(path, number, line)) for number, line in enumerate(lines, 1)]


def encode(row: Row) -> bytes:
    """Return a row as a line of JSON with all digits of numbers, and `null` for a number that is not finite."""
    return (json.dumps(_finite(row), allow_nan=False) + "\n").encode()


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rewind(path: Path, run: RunStart) -> list[Row]:
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
            raise InputError(
                f"{path}: the loss of step {step} is {losses[step]}, and {loss} in the checkpoint, so the file is "
                "of another run; restore the run's own file, or move this one away to begin a new one"
            )
    content = b"".join(line for line, _ in kept)
    if len(content) != path.stat().st_size:
        files.replace(path, content)
    return [row for _, row in kept]


LOGGERS.add("jsonl")(lambda config, workdir: JsonLines(workdir))


def _parse_line(path: Path, number: int, line: bytes) -> Row:
    with suppress(ValueError, KeyError):
        row = files.parse_json(line, dict)
        numbers = [value for name, value in row.items() if name != "split"]
        has_step = type(row["step"]) is int and 0 <= row["step"] < 2**63 and isinstance(row["split"], str)
        if has_step and all(value is None or isinstance(value, int | float) for value in numbers):
            return row
    excerpt = line[:60].decode(errors="replace").strip()
    raise InputError(
        f"{path}:{number}: not a JSON object with a step and a split, and numbers: {excerpt!r}; fix or remove the line"
    )
