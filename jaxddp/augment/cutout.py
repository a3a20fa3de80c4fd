"""Cutout: a square of an image is blackened."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxddp.augment.bounds import check_bound
from jaxddp.augment.box import centered
from jaxddp.config import AugmentConfig
from jaxddp.registry import AUGMENTATIONS


@AUGMENTATIONS.add("cutout")
def from_settings(settings: AugmentConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """With the config's side; see `cutout`."""

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        check_bound("cutout", settings.cutout, min(image.shape[:2]), "pixels, at most the image's side")
        return cutout(key, image, settings.cutout)

    return apply


def cutout(key: jax.Array, image: jax.Array, side: int) -> jax.Array:
    """A black square of `side` pixels, cut off at the borders: uint8[H, W, C].

    Its centre is any pixel of the image with equal chance (DeVries & Taylor 2017, arXiv:1708.04552).
    """
    height, width, _ = image.shape
    square = centered(key, height, width, jnp.int32(side), jnp.int32(side))
    return jnp.where(square.mask(height, width)[..., None], 0, image).astype(image.dtype)
