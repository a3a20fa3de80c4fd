"""What each validation of a run measured, and which checkpoint is best by it, in a small file beside them."""

import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.sections.goal import Goal
from jaxddp.training.checkpoints.integrity import Integrity

VALIDATION_FILE = "validation.json"
_GOAL = "goal"
_MEND = "remove it, and keep a copy of the best checkpoint: it will not be known"
_log = logging.getLogger("jaxddp.training")

Metrics = dict[str, float | None]


class ValidationFile:
    """The metrics of each step that was validated, `flat` ones, and the goal by which the run compares them.

    Args:
        goal: of the run that writes here; None reads the one that is there, the default's where none is.
        integrity: knows whether the file is the one that was written; None for a process that is not the first,
            which only reads, and may be shown an older one by a network file system.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """

    def __init__(self, directory: Path, integrity: Integrity | None, goal: Goal | None = None):
        self._path = directory / VALIDATION_FILE
        self._integrity = integrity
        self._known, self._written_goal = self._read()
        self.goal = goal or self._written_goal

    def __contains__(self, step: int) -> bool:
        return step in self._known

    @property
    def steps(self) -> list[int]:
        """The steps that were validated, in their order."""
        return sorted(self._known)

    def of(self, step: int) -> Metrics:
        """The metrics of a step; none where it was not validated."""
        return self._known.get(step, {})

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep a step's metrics; one that is not finite as null. Raises: InputError."""
        self._known[step] = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._write()

    def forget(self, step: int) -> None:
        """The step is to be another's than the one that was measured. Raises: InputError."""
        if self._known.pop(step, None) is not None:
            self._write()

    def resume(self, step: int) -> None:
        """The run goes on after this step, or begins after 0, by its own goal. What was measured later is not its own.

        Raises: InputError.
        """
        kept = {each: metrics for each, metrics in self._known.items() if each <= step}
        if len(kept) < len(self._known) or (kept and self.goal != self._written_goal):
            self._known = kept
            self._write()

    def best(self, steps: Iterable[int]) -> int | None:
        """The best of these steps by the goal; of equal ones the latest; None without any."""
        goal = self.goal
        measured = {step: value for step in self.steps if (value := self.of(step).get(goal.metric)) is not None}
        values = dict(zip(measured, goal.values(measured.values()), strict=True))
        there = [step for step in sorted(steps) if step in values]
        return there[goal.best([values[step] for step in there])] if there else None

    def _write(self) -> None:
        if self._integrity is not None:
            goal = {} if self.goal == Goal() else {_GOAL: self.goal.plain()}
            content = json.dumps({**goal, **self._known}, indent=2).encode()
            self._integrity.expect_validations(content)
            files.replace(self._path, content)
            self._written_goal = self.goal

    def _read(self) -> tuple[dict[int, Metrics], Goal]:
        try:
            content = files.read(self._path)
        except FileNotFoundError:
            if self._integrity is not None and self._integrity.expects_validations():
                _log.warning(f"{self._path}: is missing; which checkpoint is the best of those before is not known")
            return {}, Goal()
        except OSError as error:
            raise InputError(f"{self._path}: cannot be read ({error.strerror}); make it readable") from None
        try:
            told = dict(json.loads(content).items())
            goal = Goal.from_plain(told.pop(_GOAL)) if _GOAL in told else Goal()
            known = {_step(name): _checked(metrics) for name, metrics in told.items()}
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InputError(f"{self._path}: is damaged ({error}); {_MEND}") from None
        if self._integrity is not None and (fault := self._integrity.fault_of_validations(content)) is not None:
            raise InputError(f"{self._path}: is damaged ({fault}); {_MEND}")
        return known, goal


def _step(name: str) -> int:
    if name != str(int(name)) or not 0 <= int(name) < 2**63:
        raise ValueError(f"{name} is not a step")
    return int(name)


def _checked(metrics: Any) -> Metrics:
    for name, value in metrics.items():
        finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not finite:
            raise TypeError(f"{name} is not a finite number")
    return dict(metrics)
