"""The base class of optional parts of the training step, and functions over the parts of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxddp.engine.state import TrainState, kept_types
from jaxddp.mesh import Topology
from jaxddp.sections.goal import VAL, VAL_EMA, name_with_split

Follow = Callable[[TrainState, Mapping[str, float | None]], TrainState]
"""A function (state, metrics of its validation) that returns the state for the next step, the same on every process.

The metrics have the names that `jaxddp.sections.goal.flat` gives them.
"""


class Part:
    """An optional part of the training step, with its own arrays in the state.

    Its methods are pure functions, and all are optional. The step calls `loss_scale`, `gradients`, `rate_factor`,
    `update`, `judge` and `report` in this order. `own` is the part's arrays. All arguments have the same values on
    every device.

    Attributes:
        name: the name of its arrays in `TrainState.parts`, which are saved and restored with the state.
        judges: whether the step calls `judge`. It must then test whether the gradients are finite, which costs a pass
            over them. Such a part comes after `jaxddp.engine.parts.guard.Guard` in the list of parts, because the guard
            restores the arrays of the parts before it.
        beside: whether a validation measures the part's `EVAL_PARAMS` (see `jaxddp.engine.state`) beside the trained
            parameters. If true, it measures them as "val_ema" in addition to the trained parameters ("val"), as for a
            moving average. If false, it measures them as "val" instead of the trained parameters.
        follows: whether `validated` is called after a validation.
    """

    name: str
    judges = False
    beside = False
    follows = False

    def init(self, params: Any, model_state: Any) -> Any:
        """Return the part's arrays at step 0, a pytree; {} for none.

        A part that returns None is not in the state at all, so a run may be resumed with or without it.
        """
        return {}

    def loss_scale(self, own: Any) -> jax.Array | float:
        """Return a factor for the loss before it is differentiated; the gradients are divided by it."""
        return 1.0

    def gradients(self, own: Any, grads: Any) -> Any:
        """Return the gradients for the optimizer, from those averaged over the global batch.

        Gradients of frozen parameters are None. `jaxddp.models.frozen.trained` makes such a tree from a full one.
        """
        return grads

    def rate_factor(self, own: Any) -> jax.Array | None:
        """Return a factor float[] for the next step's learning rate, whatever the optimizer is; None for no factor."""
        return None

    def validated(self, own: Any, metrics: Mapping[str, jax.Array]) -> Any:
        """Return the part's next arrays, with the same types, after a validation.

        It is called between two steps if `follows` is set. `metrics` are float32[] by name, such as "val loss".
        """
        return own

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        """Return the part's next arrays and the next state: `after`, possibly with changes."""
        return own, after

    def judge(self, own: Any, before: TrainState, after: TrainState, finite: jax.Array) -> tuple[Any, TrainState]:
        """Return the same as `update`. The step calls this method after `update`, and only if `judges` is set.

        Args:
            finite: bool[], whether the averaged gradients are finite. A NaN or infinity of any device makes it false.
        """
        return own, after

    def report(self, own: Any, grads: Any) -> Mapping[str, jax.Array]:
        """Return scalars of this step, by name, which are logged with the metrics of the step.

        Here `grads` are the averaged gradients before any part changed them. In `update` they are the gradients that
        the optimizer got.
        """
        return {}


def measured_states(state: TrainState, parts: Sequence[Part]) -> dict[str, TrainState]:
    """Return the states that a validation measures, by split.

    "val" has the trained parameters, or a part's parameters that replace them. "val_ema" has a part's parameters that
    are measured in addition to the trained ones.
    """
    if not any(part.beside for part in parts):
        return {VAL: state}
    return {VAL: state.measuring(state.params), VAL_EMA: state.measuring(state.eval_params)}


def make_follow(parts: Sequence[Part], topology: Topology) -> Follow:
    """Return a function that passes the metrics of a validation to the parts that follow validations.

    Raises:
        InputError: raised by the returned function if a part changes the names, shapes or dtypes of its arrays.
    """
    following = [part for part in parts if part.follows]

    @jax.jit(out_shardings=topology.replicated)
    def updated(arrays: dict[str, jax.Array], metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {part.name: part.validated(arrays[part.name], metrics) for part in following}

    def follow(state: TrainState, metrics: Mapping[str, float | None]) -> TrainState:
        if not following:
            return state
        values = {
            name_with_split(name): np.float32(np.nan if value is None else value) for name, value in metrics.items()
        }
        arrays = {part.name: state.parts[part.name] for part in following}
        after = state.replace(parts={**state.parts, **updated(arrays, topology.replicate(values))})
        return kept_types(state, after, "the parts that follow a validation")

    return follow


def rate_factor(parts: Sequence[Part], state: TrainState) -> float:
    """Return the factor by which the parts multiply the learning rate."""
    factors = (part.rate_factor(state.parts.get(part.name)) for part in parts)
    return math.prod(float(factor) for factor in factors if factor is not None)
