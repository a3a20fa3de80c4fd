"""The metrics of a run as rows: the lines of `metrics.jsonl`, the entries of a history, and the points of curves."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.sections.goal import VAL, VAL_EMA
from jaxddp.training.events import EvaluationRecord, Listener, StepRecord
from jaxddp.training.validation.predicted_images import PredictedImages

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


def _epoch_means(row: Row) -> Row:
    means = {name.removeprefix(EPOCH_PREFIX): value for name, value in row.items() if name.startswith(EPOCH_PREFIX)}
    return {"step": row["step"], "epoch": row.get("epoch")} | means


def _columns(rows: Iterable[Row]) -> Columns:
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row if name != "split")
    dtypes = {"step": np.int64}
    return {name: np.array([row.get(name) for row in rows], dtypes.get(name, np.float64)) for name in names}
