"""Pad images, and crop them at a random position."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxddp.augment.box import check_side
from jaxddp.config import AugmentConfig


def from_settings(settings: AugmentConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a function that pads an image [H, W, C] by the config's margin, and crops it.

    The crop has the size of the image and a random position. The margin is black or reflected.
    """
    pad, mode = settings.pad, "reflect" if settings.border == "reflect" else "constant"

    def padded_crop(key: jax.Array, image: jax.Array) -> jax.Array:
        check_side("pad", pad, image)
        top, left = jax.random.randint(key, (2,), 0, 2 * pad + 1)
        padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode)
        return jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)

    return padded_crop
