"""Rotate, shear or translate an image, by nearest neighbour."""

import jax
import jax.numpy as jnp

from jaxddp.augment.ops.pixel_operation import ONE, PixelOperation

FILL = 128
"""The gray that fills pixels outside a warped image, as in the code of the authors of AutoAugment."""


def warp(image: jax.Array, operation: PixelOperation) -> jax.Array:
    """Warp uint8[C, H, W] by nearest neighbour: each pixel gets the value at the source position of its centre.

    Rotation is counter-clockwise about the image's centre. Shear moves a row or column by a fraction of its distance
    from the top or left border. Translation is by whole pixels. Up to a side of 10,000 pixels, a position that does not
    fit into int32 is far outside the image, and stays outside after the overflow.
    """
    _, height, width = image.shape
    cos, sin = operation.cos, operation.sin
    # Twice the position of the centre of each pixel, because these are integers.
    y, x = 2 * jnp.arange(height, dtype=jnp.int32)[:, None] + 1, 2 * jnp.arange(width, dtype=jnp.int32) + 1
    down, right = y - height, x - width
    row = sin * right + cos * down + operation.shear_y * x + ONE * height
    column = cos * right - sin * down + operation.shear_x * y + ONE * width
    row = row // (2 * ONE) + operation.translate_y
    column = column // (2 * ONE) + operation.translate_x
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    moved = image.at[:, row, column].get(mode="clip")
    return jnp.where(inside, moved, FILL).astype(image.dtype)
