"""The compiled program of a run's steps."""

from collections.abc import Callable
from typing import Any

from jaxddp.engine.objective import MetricSums
from jaxddp.engine.state import TrainState
from jaxddp.measure.cost import Cost, compile_with_cost


class Program:
    """A jitted step that is compiled at its first call, and then says what it costs.

    Args:
        function: of the state and what `arguments` makes of a chunk's feed. The state is donated as the function does.

    Attributes:
        cost: None before the first call.
    """

    def __init__(self, function: Any, arguments: Callable[[Any], tuple[Any, ...]] = lambda feed: (feed,)):
        self._function, self._arguments = function, arguments
        self._compiled: Any = None
        self.cost: Cost | None = None

    def __call__(self, state: TrainState, feed: Any) -> tuple[TrainState, MetricSums]:
        arguments = (state, *self._arguments(feed))
        if self._compiled is not None:
            try:
                return self._compiled(*arguments)
            except TypeError:
                # A network may change the dtype of its own state. Under `jit` that compiles anew, and so it does here.
                pass
        self._compiled, self.cost = compile_with_cost(self._function, *arguments)
        return self._compiled(*arguments)
