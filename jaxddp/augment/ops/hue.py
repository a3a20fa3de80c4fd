"""Rotate the hue of an image."""

import jax
import jax.numpy as jnp

from jaxddp.augment.ops.pixel_operation import ONE

TURN = 6 * ONE
"""A turn of the hue. Hues are in units of 1/6 turn, because the hue has six sectors with one linear formula each."""


def rotate_hue(pixels: jax.Array, shift: jax.Array) -> jax.Array:
    """Rotate the hue of int32[3, H, W], with values 0 to 255, and keep saturation and value (HSV).

    torchvision's formula for tensors, in integers. Its result differs by up to 1. For PIL images, torchvision first
    rounds hue and saturation to 8 bits.

    Args:
        shift: int32[], in units of 1/`TURN` turn, from -`TURN` to `TURN`.
    """
    red, green, blue = pixels
    value, least = pixels.max(0), pixels.min(0)
    chroma = value - least
    # `hue` is the hue times the chroma, so it is a whole number. Gray pixels have chroma 0 and hue 0.
    hue = jnp.where(
        red == value, green - blue, jnp.where(green == value, 2 * chroma + blue - red, 4 * chroma + red - green)
    )
    turned = (hue * ONE + shift * chroma) % jnp.maximum(TURN * chroma, 1)
    sector = turned // jnp.maximum(ONE * chroma, 1)
    # Within a sector, one channel rises from the least value to the largest, or falls.
    rise = (turned - sector * ONE * chroma + ONE // 2) // ONE
    rising, falling = least + rise, value - rise
    channels = (
        (value, falling, least, least, rising, value),
        (rising, value, value, falling, least, least),
        (least, least, rising, value, value, falling),
    )
    return jnp.stack(
        [jnp.select([sector == index for index in range(5)], list(each[:5]), each[5]) for each in channels]
    )
