"""Mirrored images."""

import jax
import jax.numpy as jnp

from jaxddp.registry import AUGMENTATIONS


def flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Left to right with probability 1/2: [H, W, C]."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


AUGMENTATIONS.add("flip")(lambda settings: flip)
