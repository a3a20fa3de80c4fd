"""A step whose gradient is not finite changes nothing but the step count.

`optax.apply_if_finite` does this for an optimizer alone, not for batch statistics and the arrays of other parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState

SKIPPED = "skipped"
"""1 for a step that was skipped, 0 for one that was taken."""


@dataclass(frozen=True)
class Guard(Part):
    """Leaves parameters, statistics, optimizer and the arrays of the parts before it as they were, on all devices."""

    name: str = "guard"
    judges = True

    def init(self, params: Any, model_state: Any) -> None:
        return None

    def judge(self, own: Any, before: TrainState, after: TrainState, finite: jax.Array) -> tuple[Any, TrainState]:
        kept = before.replace(step=after.step)
        return ~finite, jax.tree.map(lambda old, new: jnp.where(finite, new, old), kept, after)

    def report(self, own: Any, grads: Any) -> Mapping[str, jax.Array]:
        return {SKIPPED: own}
