"""What follows from the validations of a run: which was the best so far, and whether training is to stop."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxddp.core.wording import counted, figure
from jaxddp.sections.goal import Goal, Mean


@dataclass(frozen=True)
class EarlyStopping:
    """A fold over the validations of a run, in their order: a pure function of them.

    Attributes:
        goal: by what they are compared.
        stop_after: so many validations in a row without gain end the run; None never does.
        min_gain: a gain is to be better than the best by more than this.
        best, step: the value of the best validation, and its step; None and 0 before the first.
        without_gain: how many followed it.
        mean: of the values so far.
    """

    goal: Goal = field(default_factory=Goal)
    stop_after: int | None = None
    min_gain: float = 0.0
    best: float | None = None
    step: int = 0
    without_gain: int = 0
    mean: Mean = field(default_factory=Mean)

    def after(self, step: int, metrics: Mapping[str, float | None]) -> "EarlyStopping":
        """What it is after the validation of a step, of `flat` metrics. One that is not finite is no gain."""
        if self.goal.metric not in metrics:
            return self
        value = metrics[self.goal.metric]
        if value is None or not math.isfinite(value):
            return replace(self, without_gain=self.without_gain + 1)
        mean = self.mean.and_then(value, self.goal.smoothing)
        if self.best is None or self.goal.better(mean.value, self.best, self.min_gain):
            return replace(self, best=mean.value, step=step, without_gain=0, mean=mean)
        return replace(self, without_gain=self.without_gain + 1, mean=mean)

    def check(self, known: Iterable[str]) -> None:
        """See that what it goes by is among these `flat` metrics; the default need not be, unless the run may stop.

        Raises: InputError; says which there are.
        """
        if self.goal != Goal() or self.stop_after is not None:
            self.goal.check(known)

    @property
    def stops(self) -> bool:
        """Whether there were as many validations without gain as end the run."""
        return self.stop_after is not None and self.without_gain >= self.stop_after

    @property
    def reason(self) -> str:
        """Why it stops, and which validation was the best."""
        count = counted(self.without_gain, "validation")
        if self.best is None:
            return f"{self.goal.name} was not finite in {count}"
        smoothed = "smoothed " if self.goal.smoothing else ""
        best = figure(self.goal.metric, self.best)
        return f"no gain in {smoothed}{self.goal.name} in {count} since step {self.step}, where it was {best}"

    def patient(self) -> "EarlyStopping":
        """The same, as if the last validation had brought a gain."""
        return replace(self, without_gain=0)

    def saved(self) -> dict[str, Any]:
        """Plain values, as a checkpoint keeps them."""
        told = {"best": self.best, "step": self.step, "without_gain": self.without_gain, "mean": [*self.mean]}
        return {"goal": self.goal.plain(), **told}

    def restored(self, saved: Mapping[str, Any] | None) -> "EarlyStopping":
        """This one where it was saved. What was saved by another goal, or by an older release, begins anew."""
        if saved is None or saved["goal"] != self.goal.plain():
            return self
        told = {name: saved[name] for name in ("best", "step", "without_gain")}
        return replace(self, **told, mean=Mean(*saved["mean"]))
