"""Guard the step: log and clip the norm of the gradients, skip a step without a finite gradient, scale the loss.

`optax.apply_if_finite` keeps only the optimizer's state and the parameters. `Guard` also keeps batch statistics and the
arrays of parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.config.values import check_values, checked
from jaxddp.core.ranges import Count, Growth, Period, Positive, Range
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState
from jaxddp.kernels import path_of

GRADIENT_NORM = "gradient_norm"
LOSS_SCALE = "loss_scale"
SKIPPED = "skipped"
"""The name of the scalar that is 1 for a skipped step and 0 otherwise."""


@dataclass(frozen=True)
class GradientNorm(Part):
    """Reports the global L2 norm of the averaged gradients, before clipping.

    Parameters that are not trained yet do not count. The part keeps arrays, the number of steps, only for these.

    Attributes:
        clip: the largest norm; longer gradients are scaled down to it (Pascanu et al. 2013, arXiv:1211.5063). None
            disables clipping. A gradient that is not finite is still not finite after clipping.
        first_steps: the first step that trains a parameter, by name, or None if no step does; 0 for other parameters.

    Raises: InputError if `clip` is not above 0.
    """

    clip: float | None = None
    name: str = GRADIENT_NORM
    first_steps: tuple[tuple[str, int | None], ...] = ()

    def __post_init__(self) -> None:
        checked(self.clip, Positive | None, "GradientNorm: clip")

    def init(self, params: Any, model_state: Any) -> Any:
        return {"steps": jnp.zeros((), jnp.int32)} if self.first_steps else {}

    def gradients(self, own: Any, grads: Any) -> Any:
        if self.clip is None:
            return grads
        clip, norm = self.clip, self._norm(grads, own["steps"] if self.first_steps else None)
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
            if first is None:
                return None
            return grad if first == 0 else jnp.where(step < first, 0, grad)

        grads = jax.tree_util.tree_map_with_path(trained, grads) if firsts else grads
        return jax.lax.platform_dependent(grads, cuda=norm_by_type, rocm=norm_by_type, default=optax.tree.norm)


def norm_by_type(tree: Any) -> jax.Array:
    """Return the norm of all arrays, with a reduction for each type. Each reduction is a kernel of a GPU.

    XLA's compiler for GPUs reads the arrays as they lie; its compiler for CPUs would copy them.
    """
    by_type: dict[Any, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(tree):
        by_type.setdefault((leaf.shape, leaf.dtype), []).append(leaf)
    return optax.tree.norm([*map(jnp.stack, by_type.values())])


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

    Raises: InputError if a value is out of range.
    """

    batch_size: Count
    initial: Annotated[float, Range(0, 2.0**127, above=True)] = 65536.0
    factor: Growth = 2.0
    growth_interval: Period = 2000
    name: str = LOSS_SCALE
    judges = True

    def __post_init__(self) -> None:
        check_values(self, "LossScale: ")

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
