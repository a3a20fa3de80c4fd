"""Log the norm of the averaged gradients as `gradient_norm`, and clip gradients by it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxddp.core.errors import InputError
from jaxddp.engine.parts.part import Part

GRADIENT_NORM = "gradient_norm"


@dataclass(frozen=True)
class GradientNorm(Part):
    """Reports the global L2 norm of the averaged gradients, before clipping. It keeps no arrays.

    Attributes:
        clip: the largest norm; longer gradients are scaled down to it (Pascanu et al. 2013, arXiv:1211.5063). None
            disables clipping. A gradient that is not finite is still not finite after clipping.

    Raises:
        InputError: `clip` is not above 0.
    """

    clip: float | None = None
    name: str = GRADIENT_NORM

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"GradientNorm: clip={self.clip}; give a number above 0, or None")

    def gradients(self, own: Any, grads: Any) -> Any:
        if self.clip is None:
            return grads
        return optax.clip_by_global_norm(self.clip).update(grads, optax.EmptyState())[0]

    def report(self, own: Any, grads: Any) -> Mapping[str, jax.Array]:
        return {self.name: optax.tree.norm(grads)}
