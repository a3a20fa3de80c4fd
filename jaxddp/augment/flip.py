"""Mirrored images; upside down for pictures that have no up: textures, cells, the ground from above."""

import jax
import jax.numpy as jnp

from jaxddp.registry import AUGMENTATIONS


def flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Left to right with probability 1/2: [H, W, C]."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


def vertical_flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Top to bottom with probability 1/2: [H, W, C]."""
    return jnp.where(jax.random.bernoulli(key), image[::-1], image)


AUGMENTATIONS.add("flip")(lambda settings: flip)
AUGMENTATIONS.add("vertical_flip")(lambda settings: vertical_flip)
