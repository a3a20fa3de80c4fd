"""Exact GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415): x times the standard normal distribution function of x."""

import math

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """Compute GELU with erf, as PyTorch does, in the dtype of `x`. Intermediate values are float32 or wider.

    The derivative is custom, because JAX 0.12 cannot trace the derivative of erf inside `shard_map`.
    """
    wide = _wide(x)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    wide = _wide(x)
    density = jnp.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
    return gelu(x), tangent * (_normal_cdf(wide) + wide * density).astype(x.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _normal_cdf(x: jax.Array) -> jax.Array:
    return (1 + lax.erf(x * math.sqrt(0.5))) / 2
