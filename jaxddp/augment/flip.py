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


def alternate_flip(key: jax.Array, epoch: jax.Array, image: jax.Array) -> jax.Array:
    """Left to right in every other epoch (Jordan 2024, arXiv:2404.00498, section 3.6): [H, W, C].

    A network that trains for few epochs sees both sides of an image more evenly than by chance. `key` is the same in
    all epochs; it decides, with probability 1/2, whether the image is mirrored in epoch 0.
    """
    return jnp.where(jax.random.bernoulli(key) ^ (epoch % 2 == 1), image[:, ::-1], image)


AUGMENTATIONS.add("flip")(lambda settings: flip)
AUGMENTATIONS.add("vertical_flip")(lambda settings: vertical_flip)
