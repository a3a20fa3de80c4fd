"""The projector and the predictor of SimSiam (Chen & He 2021, arXiv:2011.10566), which are trained beside a network."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxddp.config.layers import SIMSIAM
from jaxddp.models.adapt import LinenModel
from jaxddp.models.interface import Tree

# Folded into the key of a network for the key of its projection.
_PROJECTION = 0x70726F6A
_EPSILON = 1e-5


def moments(x: jax.Array, mask: jax.Array, axis_name: str | None) -> tuple[jax.Array, jax.Array]:
    """Return the mean and the variance, float[D] each, of the unmasked rows of x, float[B, D], of all devices."""
    real = mask[:, None] > 0

    def mean(values: jax.Array) -> jax.Array:
        sums = jnp.where(real, values, 0).sum(0), real.sum().astype(x.dtype)
        total, count = sums if axis_name is None else jax.lax.psum(sums, axis_name)
        return total / jnp.maximum(count, 1)

    center = mean(x)
    return center, mean(jnp.square(x - center))


class Projection(nn.Module):
    """The projector and the predictor: features float[B, D] -> (z, p), float[B, projector_width] each.

    Their batch norms always use the statistics of the batch, which are those of its unmasked images. For the
    attributes, see `jaxddp.objectives.choices.SimSiamSettings`.
    """

    projector_layers: int
    projector_width: int
    predictor_width: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, axis_name: str | None) -> tuple[jax.Array, jax.Array]:
        def normed(x: jax.Array, width: int) -> jax.Array:
            x = nn.Dense(width, use_bias=False)(x)
            mean, var = moments(x, mask, axis_name)
            return (x - mean) * jax.lax.rsqrt(var + _EPSILON)

        def hidden(x: jax.Array, width: int, name: str) -> jax.Array:
            scale, bias = self.param(f"{name}_scale", ones, width), self.param(f"{name}_bias", zeros, width)
            return nn.relu(normed(x, width) * scale + bias)

        width, ones, zeros = self.projector_width, nn.initializers.ones, nn.initializers.zeros
        for number in range(self.projector_layers - 1):
            x = hidden(x, width, f"projector_{number}")
        z = normed(x, width)
        x = hidden(z, self.predictor_width, "predictor")
        return z, nn.Dense(width)(x)


@dataclass(frozen=True, eq=False, kw_only=True)
class Projected(LinenModel):
    """A network whose parameters include those of a `Projection`, as the entry `SIMSIAM`, which `apply` ignores."""

    projection: Projection
    features: int

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        params, model_state = super().init(key, example)
        arguments = jax.random.fold_in(key, _PROJECTION), jnp.zeros((1, self.features)), jnp.ones(1), None
        return {**params, SIMSIAM: self.projection.init(*arguments)["params"]}, model_state
