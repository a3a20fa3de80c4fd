"""Lookahead: slow weights that follow the trained ones, which are set back to them every few steps."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.core.ranges import Period
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState
from jaxddp.overrides import checked


@dataclass(frozen=True)
class Lookahead(Part):
    """Zhang et al. 2019 (arXiv:1907.08610), with a decay that may change over the run, as in Jordan 2024
    (arXiv:2404.00498, section 3.4).

    Every `period` steps slow = decay * slow + (1 - decay) * trained, and training goes on from slow. After the last
    step of the run the trained weights are the slow ones. Running statistics of the model are treated as parameters
    are; its other arrays are left alone.

    Attributes:
        decay: a function of the number of steps taken, to 0 ... 1.
        total_steps: of the run.
    """

    period: Period
    decay: optax.Schedule
    total_steps: int
    name: str = "lookahead"

    def __post_init__(self) -> None:
        checked(self.period, Period, "Lookahead: period")

    def init(self, params: Any, model_state: Any) -> Any:
        # Copies: a donated state must not hold a buffer twice.
        return jax.tree.map(jnp.copy, {"params": params, "model_state": model_state})

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        due, decay = after.step % self.period == 0, jnp.asarray(self.decay(after.step))
        trained = {"params": after.params, "model_state": after.model_state}

        def followed(slow: jax.Array, fast: jax.Array) -> jax.Array:
            if not jnp.issubdtype(fast.dtype, jnp.inexact):
                return fast
            return jnp.where(due, fast + decay.astype(fast.dtype) * (slow - fast), slow)

        slow = jax.tree.map(followed, own, trained)
        back = due | (after.step >= self.total_steps)
        kept = jax.tree.map(lambda slow, fast: jnp.where(back, slow, fast), slow, trained)
        return slow, after.replace(params=kept["params"], model_state=kept["model_state"])
