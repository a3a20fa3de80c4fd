"""The result of a trial, read from the files of its run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import jaxddp.core.files as files
from jaxddp.reports.read_runs import is_run, read_runs
from jaxddp.reports.run_files import RunFiles
from jaxddp.reports.text_tables import NOTHING, number
from jaxddp.sweeps.sweep_folder import TrialRecord
from jaxddp.training.listeners.jsonl import RESULT

_END_STATUSES = ("done", "stopped")


@dataclass(frozen=True)
class TrialResult:
    """The validations of a trial so far.

    Attributes:
        metric: the compared metric, as `RunFiles.best` names it; None without a validation.
        lowest: whether a lower value is better.
        best: the value at the best validation.
        values: the value of the metric at each validation, the oldest first.
    """

    metric: str | None = None
    lowest: bool = False
    best: float | None = None
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        return NOTHING if self.metric is None else f"{self.metric} {number(self.metric, self.best)}"


def is_finished(directory: Path, record: TrialRecord) -> bool:
    """Return whether the sweep has seen a trial end with its present arguments.

    If a trial was trained by its own command, its arguments are not known. `jaxddp train` then decides what is left.
    """
    if record.finished_words != record.words:
        return False
    return content_of_result(directory).get("status") in _END_STATUSES


def content_of_result(directory: Path) -> Mapping[str, Any]:
    """Return the content of a run's result.json; empty if there is none, or if it is damaged."""
    try:
        content = files.parse_json(files.read(directory / RESULT))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def result_of(directory: Path) -> TrialResult:
    """Return the result of a trial; without values if its run has no validation yet."""
    return result_of_run(read_runs([directory])[0]) if is_run(directory) else TrialResult()


def result_of_run(run: RunFiles) -> TrialResult:
    """Return the result of a run by its own goal, `checkpoint.best`, or by the loss if that was not measured."""
    if run.best is None:
        return TrialResult()
    metric = run.best.metric
    lowest = run.goal.lowest if metric == run.goal.metric else True
    values = run.validations[metric]
    return TrialResult(metric, lowest, run.best.value, tuple(values[np.isfinite(values)].tolist()))
