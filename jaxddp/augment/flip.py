"""Flip images. Vertical flips suit images without a preferred direction, such as textures, cells or aerial images."""

import jax
import jax.numpy as jnp

from jaxddp.registry import AUGMENTATIONS


def flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Flip an image [H, W, C] left to right with probability 1/2."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


def vertical_flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Flip an image [H, W, C] top to bottom with probability 1/2."""
    return jnp.where(jax.random.bernoulli(key), image[::-1], image)


def alternate_flip(key: jax.Array, epoch: jax.Array, image: jax.Array) -> jax.Array:
    """Flip an image [H, W, C] left to right in every other epoch (Jordan 2024, arXiv:2404.00498, section 3.6).

    In a short run, the two versions of an image appear more equally often than with random flips.

    Args:
        key: the same random key in all epochs. The image is flipped in epoch 0 with probability 1/2.
    """
    return jnp.where(jax.random.bernoulli(key) ^ (epoch % 2 == 1), image[:, ::-1], image)


AUGMENTATIONS.add("vertical_flip")(lambda settings: vertical_flip)
