"""Blend an image with a degenerate image: one without colour, contrast, brightness or sharpness."""

import jax
import jax.numpy as jnp

from jaxddp.augment.ops.pixel_operation import ONE, PixelOperation

_LUMA = (19595, 38470, 7471)
"""The weights of red, green and blue (ITU-R 601-2), in units of 1/`ONE`."""


def blend(image: jax.Array, operation: PixelOperation) -> jax.Array:
    """Blend uint8[C, H, W] with the degenerate image of an operation."""
    pixels = image.astype(jnp.int32)
    gray = gray_of(pixels)
    degenerates = {
        "color": gray,
        "contrast": mean_of(gray),
        "brightness": jnp.int32(0),
        "sharpness": _smooth(pixels),
    }
    shaped = [jnp.broadcast_to(degenerate, image.shape) for degenerate in degenerates.values()]
    degenerate = jnp.select(operation.matches(*degenerates), shaped, pixels)
    factor = operation.factor
    return blended(pixels, degenerate, factor).astype(image.dtype)


def blended(pixels: jax.Array, degenerate: jax.Array, factor: jax.Array) -> jax.Array:
    """Return degenerate + factor * (pixels - degenerate), rounded and clipped to 0..255, int32.

    Args:
        factor: in units of 1/`ONE`.
    """
    return jnp.clip(degenerate + (factor * (pixels - degenerate) + ONE // 2) // ONE, 0, 255)


def gray_of(pixels: jax.Array) -> jax.Array:
    """Return the luma of int32[C, H, W], [1, H, W] of the same dtype. Pixels of 16 bits need uint32."""
    if len(pixels) == 1:
        return pixels
    return ((pixels * jnp.array(_LUMA, pixels.dtype)[:, None, None]).sum(0, keepdims=True) + ONE // 2) // ONE


def mean_of(gray: jax.Array) -> jax.Array:
    """Return the rounded mean of int32[1, H, W], int32[]."""
    count = gray.size
    return (gray.sum(dtype=jnp.int32) + count // 2) // count


def _smooth(pixels: jax.Array) -> jax.Array:
    """Average each pixel (weight 5) with its eight neighbours (weight 1). Pixels at the border are not changed."""
    rows = pixels[:, :-2] + pixels[:, 1:-1] + pixels[:, 2:]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = pixels[:, 1:-1, 1:-1]
    return pixels.at[:, 1:-1, 1:-1].set((around + 4 * inner + 6) // 13)
