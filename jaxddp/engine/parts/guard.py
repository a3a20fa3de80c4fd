"""A step whose gradient is not finite changes nothing but the number of steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState, all_finite

SKIPPED = "skipped"
"""1 for a step that was skipped, 0 for one that was taken."""


@dataclass(frozen=True)
class Guard(Part):
    """Leaves parameters, statistics, optimizer and the arrays of the parts before it as they were.

    It asks the averaged gradients, which hold the NaN or the infinity of any device, so all devices decide alike. It
    keeps no arrays.
    """

    name: str = "guard"

    def init(self, params: Any, model_state: Any) -> None:
        return None

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        finite, kept = all_finite(grads), before.replace(step=after.step)
        return own, jax.tree.map(lambda old, new: jnp.where(finite, new, old), kept, after)

    def report(self, own: Any, grads: Any) -> Mapping[str, jax.Array]:
        return {SKIPPED: ~all_finite(grads)}
