"""The metrics of a run as rows, in `metrics.jsonl`, a history and curves, and its end in `result.json`."""

import json
import math
from collections.abc import Iterable, Mapping
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
        self._metrics = directory / METRICS
        self._result = directory / RESULT

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
                result[split] = _metrics(validation)
        result |= {name: value for name, value in asdict(run.used).items() if value is not None}
        if run.reason:
            result["reason"] = run.reason
        files.replace(self._result, encode(result))


def step_row(record: StepRecord) -> Row:
    """Return the row of a logged step, without unknown values. At the end of an epoch it has also `epoch_loss`, …"""
    row: Row = {"step": int(record.step), "epoch": float(record.epoch), "split": "train"}
    row |= {name: float(value) for name, value in record.metrics.items()}
    if record.learning_rate is not None:
        row["learning_rate"] = float(record.learning_rate)
    if record.image_size is not None:
        row["image_size"] = int(record.image_size)
    row["images_per_second"] = float(record.images_per_second)
    row["data_wait_fraction"] = float(record.data_wait_fraction)
    used = {"flops_utilization": record.used.flops_utilization, "peak_memory": record.used.peak_memory}
    row |= {name: value for name, value in used.items() if value is not None}
    if record.epoch_end is not None:
        row |= {EPOCH_PREFIX + name: float(value) for name, value in record.epoch_end.metrics.items()}
        row[EPOCH_PREFIX + "seconds"] = float(record.epoch_end.seconds)
    return row


def evaluation_row(record: EvaluationRecord) -> Row:
    """Return the row of a finished evaluation."""
    row: Row = {"step": int(record.step), "epoch": float(record.epoch), "split": record.split}
    row |= {name: float(value) for name, value in record.metrics.items()}
    return row | {"count": int(record.seen), "seconds": float(record.seconds)}


def scalars(row: Row) -> Row:
    """Return the numbers of a row by the names for loggers: `train/loss`, `train/epoch_top1`, `val/loss`, …"""
    return {f"{row['split']}/{name}": value for name, value in row.items() if name not in ("step", "split")}


def series(rows: Iterable[Row]) -> Series:
    """Return the columns of logged steps, finished epochs and evaluations."""
    rows = list(rows)
    train = [row for row in rows if row["split"] == "train"]
    steps = [{name: value for name, value in row.items() if not name.startswith(EPOCH_PREFIX)} for row in train]
    ends = [_epoch_means(row) for row in train if EPOCH_PREFIX + "seconds" in row]
    evaluations = (_columns(row for row in rows if row["split"] == split) for split in (VAL, VAL_EMA))
    return Series(_columns(steps), _columns(ends), *evaluations)


def table(rows: Iterable[Row]) -> Columns:
    """Return all rows as columns: `step` int64[n], `epoch`, `split` (strings), and every other name of a row."""
    rows = list(rows)
    columns = {name: np.zeros(0, np.int64 if name == "step" else np.float64) for name in ("step", "epoch")}
    columns |= {"split": np.array([row["split"] for row in rows], object)}
    return columns | _columns(rows)


def parse(path: Path) -> list[tuple[bytes, Row]]:
    """Return the lines of a `metrics.jsonl`, with their newline, and their rows.

    An incomplete last line, which a killed run may leave, is left out.

    Raises:
        InputError: the file cannot be read, or a line is not a row.
    """
    with files.reading(path, "give a run's metrics.jsonl"):
        *lines, _incomplete = files.read(path).split(b"\n")
    return [(line + b"\n", _parse_line(path, number, line)) for number, line in enumerate(lines, 1)]


def _metrics(validation: Mapping[str, Any]) -> Row:
    """Return the metrics and the count of a validation; None for a value that was not finite."""
    names = [name for name in validation if name not in ("step", "epoch", "split", "count", "seconds")]
    metrics = {name: None if validation[name] is None else float(validation[name]) for name in names}
    return metrics | {"count": int(validation.get("count") or 0)}


def encode(row: Row) -> bytes:
    """Return a row as a line of JSON with all digits of numbers, and `null` for a number that is not finite."""
    return (json.dumps(_finite(row), allow_nan=False) + "\n").encode()


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rewind(path: Path, run: RunStart) -> list[Row]:
    """Remove the lines after the run's first step from the file at `path`, and return the rows that stay."""
    if run.start_step == 0 or not path.exists():
        files.replace(path, b"")
        return []
    kept = [(line, row) for line, row in parse(path) if row["step"] <= run.start_step]
    _check_same_run(path, [row for _, row in kept], run.logged)
    content = b"".join(line for line, _ in kept)
    if len(content) != path.stat().st_size:
        files.replace(path, content)
    return [row for _, row in kept]


def _check_same_run(path: Path, kept: list[Row], logged: Mapping[str, Any] | None) -> None:
    """Raise `InputError` if the rows have another loss for the last logged step than the checkpoint."""
    if logged is None:
        return
    step, loss = logged["step"], _finite(logged["loss"])
    row_loss = {row["step"]: row.get("loss") for row in kept if row["split"] == "train"}.get(step, loss)
    if row_loss != loss:
        raise InputError(
            f"{path}: the loss of step {step} is {row_loss}, and {loss} in the checkpoint, so the file is "
            "of another run; restore the run's own file, or move this one away to begin a new one"
        )


LOGGERS.add("jsonl")(lambda config, workdir: JsonLines(workdir))


def _epoch_means(row: Row) -> Row:
    means = {name.removeprefix(EPOCH_PREFIX): value for name, value in row.items() if name.startswith(EPOCH_PREFIX)}
    return {"step": row["step"], "epoch": row.get("epoch")} | means


def _columns(rows: Iterable[Row]) -> Columns:
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row if name != "split")
    dtypes = {"step": np.int64}
    return {name: np.array([row.get(name) for row in rows], dtypes.get(name, np.float64)) for name in names}


def _parse_line(path: Path, number: int, line: bytes) -> Row:
    try:
        row = files.parse_json(line)
        numbers = [value for name, value in row.items() if name != "split"]
        has_step = type(row["step"]) is int and 0 <= row["step"] < 2**63
        is_row = has_step and isinstance(row["split"], str)
        if is_row and all(value is None or isinstance(value, int | float) for value in numbers):
            return row
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    excerpt = line[:60].decode(errors="replace").strip()
    raise InputError(
        f"{path}:{number}: not a JSON object with a step and a split, and numbers: {excerpt!r}; fix or remove the line"
    )
