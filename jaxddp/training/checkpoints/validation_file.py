"""`validation.json`: the metrics of each validation of a run. The best checkpoint is chosen by them."""

import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.config.goal import Goal
from jaxddp.core.errors import InputError
from jaxddp.training.checkpoints.integrity import Integrity

VALIDATION_FILE = "validation.json"
_GOAL = "goal"
_ADVICE = "remove it; the best checkpoint is then unknown, so copy the best checkpoint first"
_log = logging.getLogger("jaxddp.training")

Metrics = dict[str, float | None]


class ValidationFile:
    """The `flat` metrics of each validated step, and the goal by which the run compares them.

    Args:
        integrity: holds the digest of the file. It is None on processes that only read the file (all but the first),
            because a network file system may show them an older version.
        goal: the goal of the run that writes the file; None takes the goal in the file, or the default goal.

    Raises:
        InputError: the file cannot be read, or is damaged.
    """

    def __init__(self, directory: Path, integrity: Integrity | None, goal: Goal | None = None):
        self._path = directory / VALIDATION_FILE
        self._integrity = integrity
        self._content: bytes | None = None
        self._known, self._written_goal = self._read()
        self.goal = goal or self._written_goal

    def __contains__(self, step: int) -> bool:
        return step in self._known

    @property
    def steps(self) -> list[int]:
        """The steps that were validated, in order."""
        return sorted(self._known)

    def of(self, step: int) -> Metrics:
        """Return the metrics of a step; empty if it was not validated."""
        return self._known.get(step, {})

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, null for a value that is not finite. Raises: InputError if this fails."""
        self._known[step] = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._write()

    def forget(self, step: int) -> None:
        """Remove the metrics of a step that is about to be saved again. Raises: InputError if this fails."""
        if self._known.pop(step, None) is not None:
            self._write()

    def resume(self, step: int) -> None:
        """Remove the metrics of the steps after `step`, where the run resumes (0 for a new run), and write the goal.

        Raises: InputError if the file cannot be written.
        """
        kept = {each: metrics for each, metrics in self._known.items() if each <= step}
        if len(kept) < len(self._known) or (kept and self.goal != self._written_goal):
            self._known = kept
            self._write()

    def best(self, steps: Iterable[int]) -> int | None:
        """Return the best of these steps; the latest if several are equal, None if none was validated."""
        goal = self.goal
        measured = {step: value for step in self.steps if (value := self.of(step).get(goal.metric)) is not None}
        values = dict(zip(measured, goal.values(measured.values()), strict=True))
        validated = [step for step in sorted(steps) if step in values]
        return validated[goal.best([values[step] for step in validated])] if validated else None

    def _write(self) -> None:
        if self._integrity is not None:
            goal = {} if self.goal == Goal() else {_GOAL: self.goal.plain()}
            content = json.dumps({**goal, **self._known}, indent=2).encode()
            self._integrity.expect_validations(content, self._content)
            files.replace(self._path, content)
            self._content, self._written_goal = content, self.goal

    def _read(self) -> tuple[dict[int, Metrics], Goal]:
        try:
            content = files.read(self._path)
        except FileNotFoundError:
            if self._integrity is not None and self._integrity.expects_validations():
                _log.warning(f"{self._path}: is missing; the best of the earlier checkpoints is unknown")
            return {}, Goal()
        except OSError as error:
            raise InputError(f"{self._path}: cannot be read ({error.strerror}); make it readable") from None
        try:
            entries = files.parse_json(content, dict)
            goal = Goal.from_plain(entries.pop(_GOAL)) if _GOAL in entries else Goal()
            metrics_by_step = {int(name): _checked(metrics) for name, metrics in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise InputError(f"{self._path}: is damaged ({error}); {_ADVICE}") from None
        if self._integrity is not None and (fault := self._integrity.fault_of_validations(content)) is not None:
            raise InputError(f"{self._path}: is damaged ({fault}); {_ADVICE}")
        self._content = content
        return metrics_by_step, goal


def _checked(metrics: Any) -> Metrics:
    for name, value in metrics.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} is not finite")
    return dict(metrics)
