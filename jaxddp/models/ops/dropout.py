"""Dropout before the head: in training random features of each example are zero.

Source: Srivastava et al. 2014, "Dropout" (Journal of Machine Learning Research 15). Unlike in `flax.linen.Dropout`, the
random numbers of an example depend only on its key, so they are the same on any number of devices.
"""

import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError

# Stochastic depth draws from the example's key itself.
_STREAM = 1


def dropout(features: jax.Array, rate: float, example_keys: jax.Array | None) -> jax.Array:
    """Set each feature to zero with probability `rate`, and scale the others: float[B, F] -> float[B, F].

    The mean of a result is its input.

    Args:
        rate: a probability below 1.
        example_keys: random keys [B].

    Raises:
        InputError: `example_keys` is None.
    """
    if example_keys is None:
        raise InputError("dropout: in training every image needs its own random key; pass example_keys")
    stream = jax.vmap(lambda key: jax.random.fold_in(key, _STREAM))(example_keys)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, features.shape[1:], jnp.float32))(stream)
    return jnp.where(uniform >= rate, features / (1 - rate), 0)
