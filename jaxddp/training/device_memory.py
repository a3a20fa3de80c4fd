"""The memory of a run's devices: looked at before the first step, and named where it runs out later."""

from contextlib import AbstractContextManager
from typing import Any

from jaxddp.engine.state import TrainState
from jaxddp.measure.memory import Fit, Needs, Report, agreed_fit, named
from jaxddp.training.run import Run


class Memory:
    """How the step of a run fits its devices, once that is known."""

    def __init__(self, run: Run):
        self._run = run
        self._fit: Fit | None = None
        self.step = 0
        """Up to which steps were dispatched."""

    @property
    def is_known(self) -> bool:
        """Whether a step was checked."""
        return self._fit is not None

    def check(self, state: TrainState, feed: tuple[Any, ...]) -> None:
        """See that the program that was prepared last fits the devices of all processes, on which the feed lies.

        All processes must call it alike, before the first step. Raises: InputError; the same on all of them.
        """
        cost, topology = self._run.program.cost, self._run.topology
        needs = None if cost is None else Needs.of(cost, state.params, topology)
        self._fit = agreed_fit(self._run.division, Report.of(needs, topology, (state, feed)))
        self._fit.check()

    def of_steps(self) -> AbstractContextManager[None]:
        """Around all steps: an allocation that fails becomes an `InputError`."""

        def when() -> str:
            # The devices compute behind the host: what failed may be an earlier step.
            return f"by step {self.step}" if self.step else "before the first step"

        def advice() -> str:
            fit = self._fit or Fit(self._run.division)
            return f"{fit}; {fit.advice()}"

        return named(when, advice)

    def of_validation(self, step: int) -> AbstractContextManager[None]:
        """The same around the validation after a step, whose batch is another one."""

        def advice() -> str:
            return f"{self._fit}; lower --eval.batch-size" if self._fit else "lower --eval.batch-size"

        return named(lambda: f"in the validation after step {step}", advice)
