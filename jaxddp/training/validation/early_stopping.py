"""Early stopping: the best validation so far, and whether training stops."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxddp.core.wording import counted, figure
from jaxddp.sections.goal import VAL_EMA, Goal, Mean


@dataclass(frozen=True)
class EarlyStopping:
    """The state of early stopping, a pure function of the run's validations in their order.

    Attributes:
        goal: the metric by which validations are compared.
        stop_after: the run ends after this many validations in a row without gain; None never ends it.
        min_gain: a validation is a gain if its value is better than `best` by more than `min_gain`.
        best, step: the value of the best validation, and its step; None and 0 before the first validation.
        without_gain: the number of validations since the last gain.
        mean: the smoothed value of the metric.
    """

    goal: Goal = field(default_factory=Goal)
    stop_after: int | None = None
    min_gain: float = 0.0
    best: float | None = None
    step: int = 0
    without_gain: int = 0
    mean: Mean = field(default_factory=Mean)

    def after(self, step: int, metrics: Mapping[str, float | None]) -> "EarlyStopping":
        """Return the state after a validation with `flat` metrics. A value that is not finite is no gain."""
        if self.goal.metric not in metrics:
            return self
        value = metrics[self.goal.metric]
        if value is None or not math.isfinite(value):
            return replace(self, without_gain=self.without_gain + 1)
        mean = self.mean.with_value(value, self.goal.smoothing)
        if self.best is None or self.goal.is_better(mean.value, self.best, self.min_gain):
            return replace(self, best=mean.value, step=step, without_gain=0, mean=mean)
        return replace(self, without_gain=self.without_gain + 1, mean=mean)

    def check(self, names: Iterable[str]) -> None:
        """Check that the goal's metric is one of these `flat` metrics.

        The default goal is checked only if `stop_after` is set. Raises: InputError if the metric is missing. The error
        lists the metrics.
        """
        names = list(names)
        default = Goal.default(averages=any(name.startswith(VAL_EMA) for name in names))
        if self.goal != default or self.stop_after is not None:
            self.goal.check(names)

    @property
    def stops(self) -> bool:
        """Whether the run ends."""
        return self.stop_after is not None and self.without_gain >= self.stop_after

    @property
    def reason(self) -> str:
        """The reason for the end of the run, with the best validation."""
        count = counted(self.without_gain, "validation")
        if self.best is None:
            return f"{self.goal.name} was not finite in {count}"
        smoothed = "smoothed " if self.goal.smoothing else ""
        best = figure(self.goal.metric, self.best)
        return f"no gain in {smoothed}{self.goal.name} in {count} since step {self.step}, where it was {best}"

    def reset_patience(self) -> "EarlyStopping":
        """Return the same state with `without_gain` 0, so that `stop_after` further validations may follow."""
        return replace(self, without_gain=0)

    def saved(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        values = {"best": self.best, "step": self.step, "without_gain": self.without_gain, "mean": [*self.mean]}
        return {"goal": self.goal.plain(), **values}

    def restored(self, saved: Mapping[str, Any] | None) -> "EarlyStopping":
        """Return the state with the values of `saved()`; this state if the values are None or of another goal."""
        if saved is None or saved["goal"] != self.goal.plain():
            return self
        values = {name: saved[name] for name in ("best", "step", "without_gain")}
        return replace(self, **values, mean=Mean(*saved["mean"]))
