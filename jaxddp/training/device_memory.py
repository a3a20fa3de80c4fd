"""Device memory of a run: checked before the first step and validation, and reported if it runs out later."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from jaxddp.data.batch import Division
from jaxddp.engine.objective import MetricSums
from jaxddp.engine.programs import EvalStep
from jaxddp.engine.state import TrainState, shapes_of_one
from jaxddp.measure.cost import compile_with_cost
from jaxddp.measure.memory import Fit, Needs, agreed_fit, memory_errors
from jaxddp.training.run import Run


class Memory:
    """The check that a run fits the memory of the devices, and the errors for allocations that fail later."""

    def __init__(self, run: Run):
        self._run = run
        self._fit, self._validation = Fit(run.division), Fit(run.division, section="eval")
        self.is_checked = self._is_validation_checked = False
        """Whether `check` was called."""
        self.step = 0
        """The last step that was dispatched."""

    def check(self, state: TrainState, feed: tuple[Any, ...]) -> None:
        """Check that the last prepared program, together with the feed, fits the devices' memory on all processes.

        All processes must call it together, before the first step. Raises: InputError on all processes if the
        program does not fit on one of them.
        """
        topology, program, division = self._run.topology, self._run.program, self._run.division
        needs = Needs.of(program.cost, shapes_of_one(state).params, topology)
        self._fit = agreed_fit(division, needs, topology, (state, feed))
        self.is_checked = True
        self._fit.check()

    def checked(self, step: EvalStep) -> EvalStep:
        """Return an evaluation step whose first call in the run checks that the validation fits; see `check`."""

        def checked_step(state: TrainState, *feed: Any) -> MetricSums:
            if not self._is_validation_checked:
                self._check_validation(step, state, feed)
            return step(state, *feed)

        return checked_step

    def _check_validation(self, step: EvalStep, state: TrainState, feed: tuple[Any, ...]) -> None:
        topology = self._run.topology
        division = Division(len(feed[-1].row), topology.num_devices)
        # JAX keeps the executable for the call. The program uses, and its memory counts, only a part of the state.
        needs = Needs.of(compile_with_cost(step, state, *feed)[1], (), topology)
        fit = agreed_fit(division, needs, topology, (state.eval_params, state.eval_model_state, feed))
        self._validation = replace(fit, section="eval")
        self._is_validation_checked = True
        self._validation.check()

    def during_steps(self) -> AbstractContextManager[None]:
        """Return a context that turns a failed allocation during the steps into an `InputError`."""
        # The host dispatches steps ahead of the devices, so an earlier step may have failed.
        return _errors(lambda: f"by step {self.step}" if self.step else "before the first step", lambda: self._fit)

    def during_validation(self, step: int) -> AbstractContextManager[None]:
        """Return a context that turns a failed allocation during the validation after `step` into an `InputError`."""
        return _errors(lambda: f"in the validation after step {step}", lambda: self._validation)


def _errors(moment: Callable[[], str], fit: Callable[[], Fit]) -> AbstractContextManager[None]:
    return memory_errors(moment, lambda: (f"{fit()}; ", fit().advice()))
