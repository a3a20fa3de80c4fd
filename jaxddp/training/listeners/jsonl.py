"""`metrics.jsonl` and `result.json`: the metrics of a run, for programs to read."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.registry import LOGGERS
from jaxddp.sections.goal import VAL, VAL_EMA
from jaxddp.training.events import RunEnd, RunStart
from jaxddp.training.listeners.metric_rows import Row, RowListener, parse
from jaxddp.training.validation.predicted_images import PredictedImages

METRICS = "metrics.jsonl"
RESULT = "result.json"


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
