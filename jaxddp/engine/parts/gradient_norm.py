"""The norm of the averaged gradients, logged as `gradient_norm`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxddp.engine.parts.part import Part


@dataclass(frozen=True)
class GradientNorm(Part):
    """Reports the L2 norm of all gradients together; it changes nothing and keeps no arrays."""

    name: str = "gradient_norm"

    def report(self, own: Any, grads: Any) -> Mapping[str, jax.Array]:
        return {self.name: optax.global_norm(grads)}
