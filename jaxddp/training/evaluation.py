"""Exact evaluation: every example once, the last batch padded and masked, the count checked."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxddp.engine.objective import MetricSums
from jaxddp.engine.state import TrainState

# A display that asks more often than this would make the devices wait for it.
_REPORT_SECONDS = 0.5
_BATCHES_IN_FLIGHT = 4

Report = Callable[[Mapping[str, float], int], None]
"""(means so far, examples so far)."""


@dataclass(frozen=True)
class Evaluator:
    """Measures a state over a whole split of `num_examples`.

    Attributes:
        step: measures the batch that it is fed with, or several, whose sums it stacks.
        batches: starts over at each call; what the step is given beside the state, on the devices.
        extra: further functions of the state, whose metrics join the means.
    """

    step: Callable[..., MetricSums]
    batches: Callable[[], Iterator[tuple[Any, ...]]]
    num_examples: int
    extra: Sequence[Callable[[TrainState], Mapping[str, float]]] = ()

    def __call__(
        self, state: TrainState, report: Report | None = None, between: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Means over the split, with `count`, the number of examples that had a part in them.

        `report` is told of the means so far, now and then. `between` is called between two dispatches, by all processes
        as often; what it raises ends the evaluation. Raises: RuntimeError; the batches did not hold each example once.
        """
        totals: MetricSums | None = None
        in_flight: deque[Any] = deque()
        reported = time.perf_counter()
        for number, feed in enumerate(self.batches()):
            if number:
                between()
            sums = self.step(state, *feed)
            totals = sums.replace(values=_added(None if totals is None else totals.values, sums.values))
            in_flight.append(totals.values)
            if len(in_flight) > (_BATCHES_IN_FLIGHT if sums.values.ndim == 2 else 1):
                jax.block_until_ready(in_flight.popleft())
            if report and time.perf_counter() - reported > _REPORT_SECONDS:
                report(totals.means(), totals.count())
                reported = time.perf_counter()
        seen = totals.count() if totals is not None else 0
        if totals is None or seen != self.num_examples:
            raise RuntimeError(f"evaluation saw {seen} examples of {self.num_examples}")
        metrics = {**totals.means(), "count": seen}
        for measure in self.extra:
            metrics |= measure(state)
        return metrics


@jax.jit
def _added(total: jax.Array | None, values: jax.Array) -> jax.Array:
    """Adds the sums of one batch after the other: the bits are the same however many are measured at once."""
    for each in values.reshape(-1, *values.shape[-2:]):
        total = each if total is None else total + each
    assert total is not None  # of one batch at least
    return total
