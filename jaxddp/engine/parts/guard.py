"""Skip steps whose gradient is not finite. A skipped step changes only the step count.

`optax.apply_if_finite` protects only the optimizer and the parameters, not batch statistics and the arrays of parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState

SKIPPED = "skipped"
"""The name of the scalar that is 1 for a skipped step and 0 otherwise."""


@dataclass(frozen=True)
class Guard(Part):
    """Restores parameters, statistics, optimizer state and the arrays of the parts before it, on all devices."""

    name: str = "guard"
    judges = True

    def init(self, params: Any, model_state: Any) -> None:
        return None

    def judge(self, own: Any, before: TrainState, after: TrainState, finite: jax.Array) -> tuple[Any, TrainState]:
        kept = before.replace(step=after.step)
        return ~finite, jax.tree.map(lambda old, new: jnp.where(finite, new, old), kept, after)

    def report(self, own: Any, grads: Any) -> Mapping[str, jax.Array]:
        return {SKIPPED: own}
