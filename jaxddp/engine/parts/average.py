"""An exponential moving average of the parameters, which evaluation measures in place of them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.engine.parts.part import EVAL_PARAMS, Part
from jaxddp.engine.state import TrainState
from jaxddp.errors import InputError


@dataclass(frozen=True)
class ParameterAverage(Part):
    """Polyak averaging with a decay, which begins at the fresh parameters and warms up as min(decay, (1 + t)/(10 + t)).

    The decay of the average in a step is from 0 to 1 (exclusive); another raises `InputError`.
    """

    decay: float
    name: str = "average"

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise InputError(f"ParameterAverage: decay={self.decay}; give a number from 0 to below 1, such as 0.999")

    def init(self, params: Any, model_state: Any) -> Any:
        # Copies: a donated state must not hold a buffer twice.
        return {EVAL_PARAMS: jax.tree.map(jnp.copy, params)}

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        step = before.step.astype(jnp.float32)
        decay = jnp.minimum(self.decay, (1 + step) / (10 + step))

        def averaged(old: jax.Array, new: jax.Array) -> jax.Array:
            return old + (1 - decay).astype(new.dtype) * (new - old)

        return {EVAL_PARAMS: jax.tree.map(averaged, own[EVAL_PARAMS], after.params)}, after
