"""Resize training images that grow during a run, on the device, inside the step.

This is for images in arrays and for data sets in device memory, whose stored size is fixed.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_UPWARD_BIAS = 1 / 32
"""The value that is added before rounding, in levels: above any rounding error, and too small to be visible."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Side:
    """The side, in pixels, to which the images of a batch are resized. Like a shape, it is static under tracing.

    Attributes:
        interpolation: "bilinear" or "bicubic".
    """

    pixels: int
    interpolation: str = "bilinear"


def resized(images: jax.Array, side: Side, dtype: Any) -> jax.Array:
    """Resize pixels [B, H, W, C] to [B, side, side, C] of the same dtype, with floating-point operations in `dtype`.

    The resize is antialiased, by `jax.image.resize`. The mean of a few pixels is often halfway between two levels. Its
    rounding would depend on the last bits of a sum, which may depend on the number of devices. So values near the
    middle are always rounded up.
    """
    shape = (len(images), side.pixels, side.pixels, images.shape[-1])
    method = {"bilinear": "bilinear", "bicubic": "cubic"}[side.interpolation]
    means = jax.image.resize(images.astype(dtype), shape, method, antialias=True)
    if jnp.issubdtype(images.dtype, jnp.floating):
        return means.astype(images.dtype)
    levels = jnp.floor(means + (0.5 + _UPWARD_BIAS))
    if side.interpolation == "bicubic":
        # Some weights are negative.
        levels = jnp.clip(levels, 0, jnp.iinfo(images.dtype).max)
    return levels.astype(images.dtype)
