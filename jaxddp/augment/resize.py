"""Resize growing training images on the device, inside the step.

This is for images in arrays and for data sets in device memory, whose stored size does not change during a run.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_TOWARDS_HALF = 1 / 32
"""The bias of rounding towards the upper level, in levels: much more than a rounding error, and too little to be
visible."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Side:
    """The side to which a batch's images are resized, in pixels. Like a shape, it is static under tracing."""

    pixels: int


def resized(images: jax.Array, side: Side, dtype: Any) -> jax.Array:
    """Resize pixels [B, H, W, C] to [B, side, side, C] of the same dtype, computed in a floating-point `dtype`.

    The resize is bilinear with antialiasing, by `jax.image.resize`. The mean of a few pixels often lies halfway between
    two levels. There the last bits of a sum, which may depend on the number of devices, would decide the rounding, so
    values close to halfway are rounded up.
    """
    shape = (len(images), side.pixels, side.pixels, images.shape[-1])
    means = jax.image.resize(images.astype(dtype), shape, "bilinear", antialias=True)
    return jnp.floor(means + (0.5 + _TOWARDS_HALF)).astype(images.dtype)
