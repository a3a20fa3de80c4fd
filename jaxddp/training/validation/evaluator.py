"""Exact evaluation: every example once, the last batch padded and masked, the count checked."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from jaxddp.core.phases import doing, moved, phase
from jaxddp.engine.set_metrics import finished
from jaxddp.engine.state import TrainState
from jaxddp.engine.step_objective import MetricSums
from jaxddp.training.validation.set_sums import SetSums

# A display that asks more often than this would make the devices wait for it.
_REPORT_SECONDS = 0.5
_BATCHES_IN_FLIGHT = 4

Measure = Callable[[TrainState], Mapping[str, float]]
"""What a user measures of a state beside the metrics."""
Report = Callable[[Mapping[str, float], int], None]
"""(means so far, examples so far)."""


class Measured(NamedTuple):
    """What was found of a state over a split.

    Attributes:
        metrics: means and metrics over the set by name, with `count`, how many examples had a part in them.
        sets: what the metrics over the set were made of, by their names; see `jaxddp.engine.set_metrics`.
    """

    metrics: dict[str, float]
    sets: dict[str, Any]


@dataclass(frozen=True)
class Evaluator:
    """Measures a state over a whole split of `num_examples`.

    Attributes:
        step: measures the batch that it is fed with, or several, whose sums it stacks.
        batches: starts over at each call; what the step is given beside the state, on the devices.
        extra: further functions of the state, whose metrics join the means.
        metrics: those among them that are over the whole set are finished here.
    """

    step: Callable[..., MetricSums]
    batches: Callable[[], Iterator[tuple[Any, ...]]]
    num_examples: int
    extra: Sequence[Measure] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, state: TrainState, report: Report | None = None, between: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """The metrics over the split, as `measure` finds them."""
        return self.measure(state, report, between).metrics

    @phase("validation", "validating")
    def measure(
        self, state: TrainState, report: Report | None = None, between: Callable[[], None] = lambda: None
    ) -> Measured:
        """All that is measured over the split.

        `report` is told of the means so far, now and then. `between` is called between two dispatches, by all processes
        as often; what it raises ends the evaluation. Raises: RuntimeError; the batches did not hold each example once.
        """
        totals: MetricSums | None = None
        of_set = SetSums()
        in_flight: deque[Any] = deque()
        reported = time.perf_counter()
        for number, feed in enumerate(self.batches()):
            moved()
            if number:
                between()
            # The first one compiles.
            with doing("validating" if number else "compiling validation"):
                sums = self.step(state, *feed)
            totals = sums.replace(values=_added(None if totals is None else totals.values, sums.values), sets={})
            of_set.add(sums.sets, stacked=sums.values.ndim == 3)
            in_flight.append(totals.values)
            if len(in_flight) > (_BATCHES_IN_FLIGHT if sums.values.ndim == 2 else 1):
                with phase("device"):
                    jax.block_until_ready(in_flight.popleft())
            if report and time.perf_counter() - reported > _REPORT_SECONDS:
                report(totals.means(), totals.count())
                reported = time.perf_counter()
        with phase("device"):
            seen = totals.count() if totals is not None else 0
        if totals is None or seen != self.num_examples:
            raise RuntimeError(f"evaluation saw {seen} examples of {self.num_examples}")
        found = of_set.found()
        metrics = {**totals.means(), **finished(self.metrics, found), "count": seen}
        for measure in self.extra:
            metrics |= measure(state)
        return Measured(metrics, found)


@jax.jit
def _added(total: jax.Array | None, values: jax.Array) -> jax.Array:
    """Adds the sums of one batch after the other: the bits are the same however many are measured at once."""
    for each in values.reshape(-1, *values.shape[-2:]):
        total = each if total is None else total + each
    assert total is not None  # of one batch at least
    return total
