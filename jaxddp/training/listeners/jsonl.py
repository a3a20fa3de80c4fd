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
    """Writes `metrics.jsonl`, one object a line for every logged step and finished evaluation, and `result.json`.

    A line is handed to the operating system before the next step. A run that resumes continues the file: lines past
    the restored step and a torn last line are cut, the other bytes stay. A run from step 0 begins both files anew.
    Raises: InputError; a file cannot be read or written, or a line of a resumed `metrics.jsonl` is not the run's.
    """

    def __init__(self, directory: Path):
        self._metrics = directory / METRICS
        self._result = directory / RESULT

    def start(self, run: RunStart) -> None:
        self._run = run
        files.create(self._metrics.parent)
        # Where nothing is trained or validated any more, what the run came to stays.
        self._ended = None
        if run.start_step and self._result.exists():
            with files.reading(self._result, "remove it"):
                self._ended = files.read(self._result)
        files.remove(self._result)
        kept = _rewind(self._metrics, run)
        self._validations = {row["split"]: row for row in kept if row["split"] != "train"}

    def log(self, row: Row, predictions: PredictedImages | None = None) -> None:
        self._ended, split = None, row["split"]
        # A run that ended after the line of a validation, and before its checkpoint had the metrics, validates again.
        if self._validations.get(split, {}).get("step") != row["step"]:
            files.append(self._metrics, encode(row))
        if split != "train":
            self._validations[split] = row

    def end(self, run: RunEnd) -> None:
        if self._ended is not None and run.status in ("done", "stopped"):
            files.replace(self._result, self._ended)
            return
        result: Row = {"status": run.status, "step": run.step}
        result |= {"devices": self._run.devices, "processes": self._run.processes, VAL: None}
        for split, validation in ((VAL, run.validation), (VAL_EMA, run.averaged)):
            # A resumed run may end before its next evaluation: its last one then stands in the lines that were kept.
            if validation := validation or self._validations.get(split):
                result[split] = _metrics(validation)
        result |= {name: value for name, value in asdict(run.used).items() if value is not None}
        if run.reason:
            result["reason"] = run.reason
        files.replace(self._result, encode(result))


def _metrics(validation: Mapping[str, Any]) -> Row:
    """Those of a validation, and their count. A line that was kept says null of what was not finite."""
    names = [name for name in validation if name not in ("step", "epoch", "split", "count", "seconds")]
    metrics = {name: None if validation[name] is None else float(validation[name]) for name in names}
    return metrics | {"count": int(validation.get("count") or 0)}


def encode(row: Row) -> bytes:
    """One line of JSON, newline included; numbers with all their digits, `null` for one that is not finite."""
    return (json.dumps(_finite(row), allow_nan=False) + "\n").encode()


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rewind(path: Path, run: RunStart) -> list[Row]:
    """Cuts what lies past the run's first step from the file at `path` and returns the rows that stay."""
    if run.start_step == 0 or not path.exists():
        files.replace(path, b"")
        return []
    kept = [(line, row) for line, row in parse(path) if row["step"] <= run.start_step]
    _check_own(path, [row for _, row in kept], run.logged)
    content = b"".join(line for line, _ in kept)
    if len(content) != path.stat().st_size:
        files.replace(path, content)
    return [row for _, row in kept]


def _check_own(path: Path, kept: list[Row], logged: Mapping[str, Any] | None) -> None:
    """Raises `InputError` where the rows have another loss of a step than the checkpoint that was saved after it."""
    if logged is None:
        return
    step, loss = logged["step"], _finite(logged["loss"])
    found = {row["step"]: row.get("loss") for row in kept if row["split"] == "train"}.get(step, loss)
    if found != loss:
        raise InputError(
            f"{path}: the loss of step {step} is {found}, and {loss} by the checkpoint, so these lines are another "
            "run's; put back the run's own, or move them away: new ones begin"
        )


LOGGERS.add("jsonl")(lambda config, workdir: JsonLines(workdir))
