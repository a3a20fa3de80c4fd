"""Images that are resized on the device, inside of the step: arrays, and what lies on the devices, keep one size."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_TOWARDS_HALF = 1 / 32
"""Levels by which rounding prefers the upper one: far more than the last bits of a sum, far less than can be seen."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Side:
    """The side that a batch's images are to have, in pixels: it is known when a program is traced, as a shape is."""

    pixels: int


def resized(images: jax.Array, side: Side, dtype: Any) -> jax.Array:
    """Pixels [B, H, W, C] as pixels of the same dtype [B, side, side, C], computed in a floating-point `dtype`.

    Bilinear, and smoothed where an axis shrinks, as `jax.image.resize` does. The mean of a few pixels often lies half
    way between two levels. There the last bits of a sum, which may be others on another number of devices, would
    decide; so what is close to it goes up.
    """
    shape = (len(images), side.pixels, side.pixels, images.shape[-1])
    means = jax.image.resize(images.astype(dtype), shape, "bilinear", antialias=True)
    return jnp.floor(means + (0.5 + _TOWARDS_HALF)).astype(images.dtype)
