"""Skip steps whose gradient is not finite. A skipped step changes only the step count.

`optax.apply_if_finite` keeps only the optimizer's state and the parameters. It does not keep batch statistics and the
arrays of parts.
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
    """Restores the state from before a step whose gradient is not finite, on all devices.

    It restores parameters, statistics, the optimizer's state, and the arrays of the parts that come before it.
    """

    name: str = "guard"
    judges = True

    def init(self, params: Any, model_state: Any) -> None:
        return None

    def judge(self, own: Any, before: TrainState, after: TrainState, finite: jax.Array) -> tuple[Any, TrainState]:
        skipped = before.replace(step=after.step)
        return ~finite, jax.tree.map(lambda old, new: jnp.where(finite, new, old), skipped, after)

    def report(self, own: Any, grads: Any) -> Mapping[str, jax.Array]:
        return {SKIPPED: own}
