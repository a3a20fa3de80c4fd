"""Lookahead: slow weights follow the trained weights, and every few steps training restarts from the slow weights."""

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
    """Lookahead (Zhang et al. 2019, arXiv:1907.08610), with a decay that may change over the run.

    The changing decay is from Jordan 2024 (arXiv:2404.00498, section 3.4). Every `period` steps
    slow = decay * slow + (1 - decay) * trained, and training continues from the slow weights. After the last step of
    the run the slow weights replace the trained weights. The rule
    applies to the model's running statistics, too. The model's other arrays do not change.

    Attributes:
        period: the number of steps between updates of the slow weights.
        decay: a function of the number of completed steps that returns the decay, 0 to 1.
        total_steps: the number of steps of the run.
    """

    period: Period
    decay: optax.Schedule
    total_steps: int
    name: str = "lookahead"

    def __post_init__(self) -> None:
        checked(self.period, Period, "Lookahead: period")

    def init(self, params: Any, model_state: Any) -> Any:
        # Copy, because a donated state must not hold a buffer twice.
        return jax.tree.map(jnp.copy, {"params": params, "model_state": model_state})

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        due, decay = after.step % self.period == 0, jnp.asarray(self.decay(after.step))
        trained = {"params": after.params, "model_state": after.model_state}

        def update_slow(slow: jax.Array, fast: jax.Array) -> jax.Array:
            if not jnp.issubdtype(fast.dtype, jnp.inexact):
                return fast
            return jnp.where(due, fast + decay.astype(fast.dtype) * (slow - fast), slow)

        slow = jax.tree.map(update_slow, own, trained)
        restarts = due | (after.step >= self.total_steps)
        weights = jax.tree.map(lambda slow, fast: jnp.where(restarts, slow, fast), slow, trained)
        return slow, after.replace(params=weights["params"], model_state=weights["model_state"])
