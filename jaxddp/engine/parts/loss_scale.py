"""Dynamic loss scaling, which keeps float16 gradients from overflow and underflow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState

LOSS_SCALE = "loss_scale"


@dataclass(frozen=True)
class LossScale(Part):
    """Dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    The rule is that of `flax.training.dynamic_scale.DynamicScale`. The mean loss of the global batch is multiplied by a
    scale before it is differentiated. After `growth_interval` finite gradients in a row, the next finite gradient
    multiplies the scale by `factor`. After a gradient that is not finite, the scale is divided by `factor`, and
    `jaxddp.engine.parts.guard.Guard`, which comes before this part, skips the step. The test for finite values reads
    the averaged gradients, so all devices have the same scale. The scale of the next step is logged as `loss_scale`.

    Attributes:
        batch_size: the size of the global batch. The step differentiates the sum of the batch's losses, and the scale
            applies to their mean. So the factor of the sum is the scale divided by `batch_size`.
        initial: the first scale.
        factor: the factor by which the scale grows and shrinks.
        growth_interval: the number of finite gradients before the scale grows.

    Raises:
        InputError: a value is out of range.
    """

    batch_size: int
    initial: float = 65536.0
    factor: float = 2.0
    growth_interval: int = 2000
    name: str = LOSS_SCALE
    judges = True

    def __post_init__(self) -> None:
        for key, least in (("batch_size", 1), ("growth_interval", 1)):
            if getattr(self, key) < least:
                raise InputError(f"LossScale: {key}={getattr(self, key)}; give at least {least}")
        for key, above in (("initial", 0), ("factor", 1)):
            if not getattr(self, key) > above:
                raise InputError(f"LossScale: {key}={getattr(self, key)}; give a number above {above}")

    def init(self, params: Any, model_state: Any) -> Any:
        """Return {"scale": float32[], "finite_steps": int32[]}, the number of finite steps since the scale changed."""
        return {"scale": jnp.float32(self.initial), "finite_steps": jnp.int32(0)}

    def loss_scale(self, own: Any) -> jax.Array:
        return own["scale"] / self.batch_size

    def judge(self, own: Any, before: TrainState, after: TrainState, finite: jax.Array) -> tuple[Any, TrainState]:
        scale, steps = own["scale"], own["finite_steps"]
        grows = steps == self.growth_interval
        largest, smallest = jnp.finfo(jnp.float32).max, jnp.finfo(jnp.float32).tiny
        grown = jnp.where(grows, jnp.minimum(scale * self.factor, largest), scale)
        shrunk = jnp.maximum(scale / self.factor, smallest)
        next_steps = jnp.where(finite & ~grows, steps + 1, 0)
        return {"scale": jnp.where(finite, grown, shrunk), "finite_steps": next_steps}, after

    def report(self, own: Any, grads: Any) -> Mapping[str, jax.Array]:
        return {self.name: own["scale"]}
