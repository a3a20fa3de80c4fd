"""The base class of optional parts of the training step, and functions over the parts of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxddp.config.goal import VAL, VAL_EMA
from jaxddp.engine.state import TrainState

Follow = Callable[[TrainState, Mapping[str, float | None]], TrainState]
"""A function (state, metrics of the state's validation) that returns the next step's state, equal on every process.

The metrics have the names that `jaxddp.config.goal.flat` gives them.
"""


class Part:
    """An optional part of the training step, with its own arrays in the state.

    Its methods are pure functions, and all are optional. The step calls `loss_scale`, `gradients`, `rate_factor`,
    `update`, `judge` and `report` in this order. The argument `own` holds the part's arrays. All arguments
    have the same values on every device.

    Attributes:
        name: the key of the part's arrays in `TrainState.parts`, which are saved and restored with the state.
        judges: whether the step calls `judge`. If true, the step tests whether the gradients are finite, which costs a
            pass over the gradients. In the list of parts, such a part comes after `jaxddp.engine.parts.guard.Guard`,
            because the guard restores the arrays of all parts before itself.
        beside: whether a validation measures both the trained parameters and the part's `EVAL_PARAMS` (see
            `jaxddp.engine.state`). If true, "val" measures the trained parameters and "val_ema" measures
            `EVAL_PARAMS`, as for a moving average. If false, "val" measures `EVAL_PARAMS`, and there is no "val_ema".
        follows: whether `validated` is called after each validation.
    """

    name: str
    judges = False
    beside = False
    follows = False

    def init(self, params: Any, model_state: Any) -> Any:
        """Return the part's arrays at step 0, a pytree; {} for none.

        If `init` returns None, the state has no entry for the part, so a run may be resumed with or without the part.
        """
        return {}

    def loss_scale(self, own: Any) -> jax.Array | float:
        """Return a factor of the loss for differentiation. The gradients are divided by the same factor."""
        return 1.0

    def gradients(self, own: Any, grads: Any) -> Any:
        """Return the gradients for the optimizer from the averaged gradients of the global batch.

        Gradients of frozen parameters are None, as in a tree of `jaxddp.models.interface.without_frozen`.
        """
        return grads

    def rate_factor(self, own: Any) -> jax.Array | None:
        """Return a factor, float[], of the next step's learning rate, for any optimizer; None for no factor."""
        return None

    def validated(self, own: Any, metrics: Mapping[str, jax.Array]) -> Any:
        """Return the part's next arrays, with the same types, after a validation.

        This method is called between two steps if `follows` is true. `metrics` are float32[] by name, such as
        "val loss".
        """
        return own

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        """Return the part's next arrays and the next state: `after`, possibly with changes."""
        return own, after

    def judge(self, own: Any, before: TrainState, after: TrainState, finite: jax.Array) -> tuple[Any, TrainState]:
        """Return the part's next arrays and the next state. It is called after `update` if `judges` is true.

        Args:
            finite: bool[], whether the averaged gradients are finite. A NaN or infinity of any device makes it false.
        """
        return own, after

    def report(self, own: Any, grads: Any) -> Mapping[str, jax.Array]:
        """Return scalars of this step, by name, which are logged with the metrics of the step.

        Here `grads` are the averaged gradients before any part changes them. In `update` they are the gradients that
        the optimizer gets.
        """
        return {}


def measured_states(state: TrainState, parts: Sequence[Part]) -> dict[str, TrainState]:
    """Return the states that a validation measures, by split: "val" and, if a part sets `beside`, "val_ema".

    See `Part` for the parameters of the two states.
    """
    if not any(part.beside for part in parts):
        return {VAL: state}
    averaged = state.with_variables(state.eval_params, state.eval_model_state)
    return {VAL: state.with_variables(state.params, state.model_state), VAL_EMA: averaged}


def rate_factor(parts: Sequence[Part], state: TrainState) -> float:
    """Return the factor by which the parts multiply the learning rate."""

    def factor_of(part: Part) -> float:
        own = state.parts.get(part.name)
        if state.stacked is None or not jax.tree.leaves(own):
            factor = part.rate_factor(own)
        elif (factors := jax.vmap(part.rate_factor)(own)) is not None:
            # The stacked states have equal factors, because all of them follow the same validations.
            factor = jax.device_get(factors.addressable_data(0))[0]
        else:
            factor = None
        return 1.0 if factor is None else float(factor)

    return math.prod(map(factor_of, parts))
