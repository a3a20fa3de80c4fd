"""One validation of a run: evaluates the trained and the averaged parameters, and reports to the listeners."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxddp.core.errors import InputError
from jaxddp.core.phases import running_time
from jaxddp.core.wording import first_line
from jaxddp.engine.parts.part import measured_states
from jaxddp.engine.state import TrainState
from jaxddp.training.events import EvaluationRecord
from jaxddp.training.run import Run
from jaxddp.training.validation.evaluator import Evaluator
from jaxddp.training.validation.predicted_images import PredictedImages

_log = logging.getLogger("jaxddp.training")


class ReportedEvaluation:
    """The evaluation of the trained parameters, and of parameters that a part of the step averages.

    Args:
        notify: called as `notify("evaluation", record)` while an evaluation is in progress.

    Attributes:
        last: the metrics of the last validation by split, with `count`; empty before the first.
    """

    def __init__(self, run: Run, notify: Callable[[str, Any], None]):
        self._run, self._notify, self._predictor = run, notify, run.validation.predictor
        self.last: Mapping[str, Mapping[str, float]] = {}

    def __call__(
        self, evaluator: Evaluator, step: int, state: TrainState, between: Callable[[], None]
    ) -> list[EvaluationRecord]:
        """Validate a state after a step, and return a record for each split; for `between` see `Evaluator`."""
        states = measured_states(state, self._run.steps.parts)
        measured = {split: self._measure_split(evaluator, step, split, each, between) for split, each in states.items()}
        self.last = {split: means for split, (means, _) in measured.items()}
        return [record for _, record in measured.values()]

    def _measure_split(
        self, evaluator: Evaluator, step: int, split: str, state: TrainState, between: Callable[[], None]
    ) -> tuple[dict[str, float], EvaluationRecord]:
        begin, epoch, total = running_time(), self._run.plan.epoch(step), evaluator.num_examples

        def record(metrics: Mapping[str, float], seen: int) -> EvaluationRecord:
            return EvaluationRecord(step, epoch, metrics, seen, total, running_time() - begin, split)

        def report(means: Mapping[str, float], seen: int) -> None:
            # `seen == total` would mark the record as final, but after the last batch metrics are still computed.
            self._notify("evaluation", record(means, min(seen, total - 1)))

        means, sets = evaluator.measure(state, report, between)
        final_record = record({name: value for name, value in means.items() if name != "count"}, total)
        return means, replace(final_record, sets=sets)

    def predictions(self, state: TrainState) -> PredictedImages | None:
        """Return the predictions of the images that listeners request; None if there are no such images.

        After a failure, which is logged in one line, this always returns None. If one process cannot read the images,
        no process computes predictions, because all must compute them together.
        """
        if self._predictor is None:
            return None
        peers, fault = self._run.topology.peers, ""
        try:
            self._predictor.read()
        except InputError as error:
            fault = first_line(error)
        fault = next(filter(None, peers.exchange("images to show", fault)), "")
        try:
            if not fault:
                return self._predictor(state)
        except jax.errors.JaxRuntimeError as error:
            # After an error of one device, the other processes wait for it.
            if not peers.is_alone:
                raise
            fault = first_line(error)
        self._predictor = None
        _log.warning(f"the predictions to show failed ({fault}) and are left out from here on")
        return None
