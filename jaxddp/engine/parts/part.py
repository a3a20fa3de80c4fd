"""An optional piece of the training step, with arrays of its own in the state."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxddp.engine.state import TrainState, kept_types
from jaxddp.mesh import Topology
from jaxddp.sections.goal import VAL, VAL_EMA, named

Follow = Callable[[TrainState, Mapping[str, float | None]], TrainState]
"""(state, `flat` metrics of its validation) -> the state that the next step takes; the same on every process."""


class Part:
    """Pure functions that a step calls in this order; each is optional. All see the same values on every device.

    Attributes:
        name: of its arrays in `TrainState.parts`, which are saved and restored with the state.
        judges: whether it wants to know if the gradients are finite, which costs a look at all of them. Such a part
            comes after the guard, which leaves the arrays of those before it as they were.
        beside: whether a validation measures its `EVAL_PARAMS` (see `jaxddp.engine.state`) beside the trained
            parameters, as "val_ema", as suits an average of them; otherwise in place of them, as "val".
        follows: whether `validated` is to be called.
    """

    name: str
    judges = False
    beside = False
    follows = False

    def init(self, params: Any, model_state: Any) -> Any:
        """Its own arrays at step 0, a pytree; {} for none.

        None has no place in the state at all, so that a run may be resumed with the part or without it.
        """
        return {}

    def loss_scale(self, own: Any) -> jax.Array | float:
        """What the loss is multiplied by before it is differentiated; the gradients are divided by it."""
        return 1.0

    def gradients(self, own: Any, grads: Any) -> Any:
        """The gradients that the optimizer is given, of those averaged over the global batch.

        In their tree None stands for a frozen parameter; `jaxddp.models.frozen.trained` makes such a tree of others.
        """
        return grads

    def rate_factor(self, own: Any) -> jax.Array | None:
        """What multiplies the learning rate of the next step, whatever the optimizer, float[]; None for nothing."""
        return None

    def validated(self, own: Any, metrics: Mapping[str, jax.Array]) -> Any:
        """Its next arrays, of the same types, after a validation, whose metrics are float32[] each: "val loss", ….

        It is called between two steps, where `follows` is set.
        """
        return own

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        """Its next arrays, and the next state: `after`, or one in which some of it is left as `before`."""
        return own, after

    def judge(self, own: Any, before: TrainState, after: TrainState, finite: jax.Array) -> tuple[Any, TrainState]:
        """The same as `update`, and after it, by whether the averaged gradients are finite, bool[].

        They hold the NaN or the infinity of any device. It is called where `judges` is set.
        """
        return own, after

    def report(self, own: Any, grads: Any) -> Mapping[str, jax.Array]:
        """Scalars of this step, by name, which are logged beside its metrics.

        `grads` are the averaged ones, before any part changed them; `update` and `judge` see what the optimizer did.
        """
        return {}


def measured_states(state: TrainState, parts: Sequence[Part]) -> dict[str, TrainState]:
    """What a validation measures, by split: as "val" the trained parameters, or what a part has in place of them, and
    as "val_ema" what one has beside them."""
    if not any(part.beside for part in parts):
        return {VAL: state}
    return {VAL: state.measuring(state.params), VAL_EMA: state.measuring(state.eval_params)}


def make_follow(parts: Sequence[Part], topology: Topology) -> Follow:
    """Tell validations to the parts that follow them; of a step that has none the state stays as it is.

    Raises: InputError; when it is called, where a part changes what its arrays consist of.
    """
    following = [part for part in parts if part.follows]

    @jax.jit(out_shardings=topology.replicated)
    def told(own: dict[str, jax.Array], metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {part.name: part.validated(own[part.name], metrics) for part in following}

    def follow(state: TrainState, metrics: Mapping[str, float | None]) -> TrainState:
        if not following:
            return state
        values = {named(name): np.float32(np.nan if value is None else value) for name, value in metrics.items()}
        own = {part.name: state.parts[part.name] for part in following}
        told_of = state.replace(parts={**state.parts, **told(own, topology.replicate(values))})
        return kept_types(state, told_of, "what parts make of a validation")

    return follow


def rate_factor(parts: Sequence[Part], state: TrainState) -> float:
    """What the parts multiply the learning rate by."""
    factors = (part.rate_factor(state.parts.get(part.name)) for part in parts)
    return math.prod(float(factor) for factor in factors if factor is not None)
