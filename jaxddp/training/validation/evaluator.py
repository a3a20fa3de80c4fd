"""Exact evaluation: every example is evaluated once, the last batch is padded and masked, and the count is checked."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from jaxddp.core.phases import doing, moved, phase, reached
from jaxddp.core.wording import speed
from jaxddp.engine.objective import MetricSums, finish_metrics
from jaxddp.engine.state import TrainState
from jaxddp.training.validation.set_sums import SetSums

# More frequent reports would make the devices wait for the host.
_REPORT_SECONDS = 0.5
_BATCHES_IN_FLIGHT = 4

Measure = Callable[[TrainState], Mapping[str, float]]
"""A function of the user that computes further metrics of a state."""
Report = Callable[[Mapping[str, float], int], None]
"""A function that is called during an evaluation with the means and the number of examples so far."""


class Measured(NamedTuple):
    """The metrics of a state over a split.

    Attributes:
        metrics: all metrics by name (means over the examples, and metrics over the whole set), and `count`, the number
            of examples.
        sets: the arrays from which each metric over the whole set was computed, by its name; see
            `jaxddp.engine.objective`.
    """

    metrics: dict[str, float]
    sets: dict[str, Any]


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a state over a whole split of `num_examples`.

    Attributes:
        step: returns the metric sums of a batch, or of several batches, stacked.
        batches: returns a new iterator at each call. It yields the step's arguments after the state, placed on the
            devices.
        extra: further functions of the state, whose metrics are added.
        metrics: the metrics by name; those over the whole set are computed after the last batch.
    """

    step: Callable[..., MetricSums]
    batches: Callable[[], Iterator[tuple[Any, ...]]]
    num_examples: int
    extra: Sequence[Measure] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, state: TrainState, report: Report | None = None, between: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Return the metrics of `measure`."""
        return self.measure(state, report, between).metrics

    def measure(
        self, state: TrainState, report: Report | None = None, between: Callable[[], None] = lambda: None
    ) -> Measured:
        """Return the metrics of a state over the split.

        Args:
            report: called from time to time with the means and the number of examples so far.
            between: called between two dispatches, equally often by all processes; an error ends the evaluation.

        Raises:
            RuntimeError: the batches did not hold `num_examples` examples.
        """
        with phase("validation"), doing("validating", self.num_examples, "image"):
            return self._measure(state, report, between)

    def _measure(self, state: TrainState, report: Report | None, between: Callable[[], None]) -> Measured:
        totals: MetricSums | None = None
        set_sums = SetSums()
        in_flight: deque[Any] = deque()
        begin = last_report = time.perf_counter()
        for number, feed in enumerate(self.batches()):
            moved()
            if number:
                between()
            if number:
                sums = self.step(state, *feed)
            else:
                with phase("compile", "compiling validation"):
                    sums = self.step(state, *feed)
                begin = time.perf_counter()
            totals = sums.replace(values=_added(None if totals is None else totals.values, sums.values), sets={})
            set_sums.add(sums.sets, stacked=sums.values.ndim == 3)
            in_flight.append(totals.values)
            if len(in_flight) > (_BATCHES_IN_FLIGHT if sums.values.ndim == 2 else 1):
                with phase("device"):
                    jax.block_until_ready(in_flight.popleft())
            if time.perf_counter() - last_report > _REPORT_SECONDS:
                seen = totals.count()
                reached(seen, f"{speed(seen / (time.perf_counter() - begin))} images/s")
                if report:
                    report(totals.means(), seen)
                last_report = time.perf_counter()
        with phase("device"):
            seen = totals.count() if totals is not None else 0
        if totals is None or seen != self.num_examples:
            raise RuntimeError(f"evaluation saw {seen} examples of {self.num_examples}")
        sets = set_sums.results()
        metrics = {**totals.means(), **finish_metrics(self.metrics, sets), "count": seen}
        for measure in self.extra:
            metrics |= measure(state)
        return Measured(metrics, sets)


@jax.jit
def _added(total: jax.Array | None, values: jax.Array) -> jax.Array:
    """Add the sums batch by batch, so the result has the same bits for any number of batches in a step."""
    for each in values.reshape(-1, *values.shape[-2:]):
        total = each if total is None else total + each
    assert total is not None  # There is at least one batch.
    return total
