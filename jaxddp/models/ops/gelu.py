"""GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415), exact: x times the normal distribution's share below x."""

import math

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """As PyTorch computes it, by erf; the result has the dtype of `x`, what is between float32 at least.

    Its derivative is written here because JAX 0.12 cannot trace that of erf inside of `shard_map`.
    """
    wide = _wide(x)
    return (wide * _share_below(wide)).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    wide = _wide(x)
    density = jnp.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
    return gelu(x), tangent * (_share_below(wide) + wide * density).astype(x.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _share_below(x: jax.Array) -> jax.Array:
    return (1 + lax.erf(x * math.sqrt(0.5))) / 2
