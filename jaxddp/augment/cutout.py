"""Cutout: a square of an image is blackened."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxddp.augment.box import centered, check_side
from jaxddp.config import AugmentConfig
from jaxddp.registry import AUGMENTATIONS


@AUGMENTATIONS.add("cutout")
def from_settings(settings: AugmentConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A black square with the config's side, cut off at the borders.

    Its centre is any pixel of the image, uint8[H, W, C], with equal chance (DeVries & Taylor 2017, arXiv:1708.04552).
    """

    def cutout(key: jax.Array, image: jax.Array) -> jax.Array:
        check_side("cutout", settings.cutout, image)
        height, width, _ = image.shape
        side = jnp.int32(settings.cutout)
        square = centered(key, height, width, side, side)
        return jnp.where(square.mask(height, width)[..., None], 0, image).astype(image.dtype)

    return cutout
