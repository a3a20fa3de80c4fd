"""One validation of a run: all that is measured of a state, and what its listeners are told meanwhile."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxddp.core.errors import InputError
from jaxddp.core.wording import first_line
from jaxddp.engine.parts.part import measured_states
from jaxddp.engine.state import TrainState
from jaxddp.training.events import EvaluationRecord
from jaxddp.training.run import Run
from jaxddp.training.validation.evaluator import Evaluator
from jaxddp.training.validation.predicted_images import PredictedImages

_log = logging.getLogger("jaxddp.training")


class ReportedEvaluation:
    """Measures the trained parameters, and beside them what a part averages; `tell` is told of evaluations that go on.

    Attributes:
        last: the means of the last validation by split, with `count`; empty before the first.
    """

    def __init__(self, run: Run, tell: Callable[[str, Any], None]):
        self._run, self._tell, self._predictor = run, tell, run.validation.predictor
        self.last: Mapping[str, Mapping[str, float]] = {}

    def __call__(
        self, evaluator: Evaluator, step: int, state: TrainState, between: Callable[[], None]
    ) -> list[EvaluationRecord]:
        """The records of a validation after a step, one a split; for `between` see `Evaluator`."""
        states = measured_states(state, self._run.steps.parts)
        measured = {split: self._measured(evaluator, step, split, own, between) for split, own in states.items()}
        self.last = {split: means for split, (means, _) in measured.items()}
        return [record for _, record in measured.values()]

    def _measured(
        self, evaluator: Evaluator, step: int, split: str, state: TrainState, between: Callable[[], None]
    ) -> tuple[dict[str, float], EvaluationRecord]:
        begin, epoch, total = time.perf_counter(), self._run.plan.epoch(step), evaluator.num_examples

        def record(metrics: Mapping[str, float], seen: int) -> EvaluationRecord:
            return EvaluationRecord(step, epoch, metrics, seen, total, time.perf_counter() - begin, split)

        def report(means: Mapping[str, float], seen: int) -> None:
            # Padding is never counted, so an evaluation in progress cannot be mistaken for a finished one.
            self._tell("evaluation", record(means, min(seen, total - 1)))

        means, sets = evaluator.measure(state, report, between)
        finished = record({name: value for name, value in means.items() if name != "count"}, total)
        return means, replace(finished, sets=sets)

    def predictions(self, state: TrainState) -> PredictedImages | None:
        """Of the images that listeners want to show, by the parameters that predict. None after the first failure,
        which is said in one line, as with loggers."""
        predictor = self._predictor
        try:
            return None if predictor is None else predictor(state)
        except (InputError, jax.errors.JaxRuntimeError) as error:
            self._predictor = None
            _log.warning(f"the predictions to show failed ({first_line(error)}) and are left out from here on")
            return None
