"""Log the norm of the averaged gradients as `gradient_norm`, and clip gradients by it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.core.errors import InputError
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState
from jaxddp.models.variables import path_of

GRADIENT_NORM = "gradient_norm"


@dataclass(frozen=True)
class GradientNorm(Part):
    """Reports the global L2 norm of the averaged gradients, before clipping.

    Parameters that are not trained yet do not count. The part keeps arrays, the number of steps, only for these.

    Attributes:
        clip: the largest norm; longer gradients are scaled down to it (Pascanu et al. 2013, arXiv:1211.5063). None
            disables clipping. A gradient that is not finite is still not finite after clipping.
        first_steps: the first step that trains a parameter, by name, or None if no step does; 0 for other parameters.

    Raises:
        InputError: `clip` is not above 0.
    """

    clip: float | None = None
    name: str = GRADIENT_NORM
    first_steps: tuple[tuple[str, int | None], ...] = ()

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"GradientNorm: clip={self.clip}; give a number above 0, or None")

    def init(self, params: Any, model_state: Any) -> Any:
        return {"steps": jnp.zeros((), jnp.int32)} if self.first_steps else {}

    def gradients(self, own: Any, grads: Any) -> Any:
        if self.clip is None:
            return grads
        if not self.first_steps:
            return optax.clip_by_global_norm(self.clip).update(grads, optax.EmptyState())[0]
        clip, norm = self.clip, self._norm(grads, own["steps"])
        return jax.tree.map(lambda grad: jnp.where(norm < clip, grad, grad / norm.astype(grad.dtype) * clip), grads)

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        return jax.tree.map(lambda steps: steps + 1, own), after

    def report(self, own: Any, grads: Any) -> Mapping[str, jax.Array]:
        return {self.name: self._norm(grads, own["steps"] - 1 if self.first_steps else None)}

    def _norm(self, grads: Any, step: Any) -> jax.Array:
        """Return the norm of the gradients of the parameters that a step trains."""
        firsts = dict(self.first_steps)

        def trained(path: Any, grad: jax.Array) -> jax.Array | None:
            first = firsts.get(path_of(path), 0)
            return grad if first == 0 else None if first is None else jnp.where(step < first, 0, grad)

        return optax.tree.norm(jax.tree_util.tree_map_with_path(trained, grads) if firsts else grads)
