"""A rectangle of pixels whose position and size are computed on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError, Key


class Box(NamedTuple):
    """A rectangle with fields int32[]. It may extend beyond the image; pixels outside the image are ignored."""

    top: jax.Array
    left: jax.Array
    height: jax.Array
    width: jax.Array

    def mask(self, height: int, width: int) -> jax.Array:
        """Return a mask, bool[height, width], of the pixels of an image that are in the box."""
        row, column = jnp.arange(height)[:, None] - self.top, jnp.arange(width) - self.left
        return (row >= 0) & (row < self.height) & (column >= 0) & (column < self.width)


def centered(key: jax.Array, image_height: int, image_width: int, height: jax.Array, width: jax.Array) -> Box:
    """Draw a box of this height and width, int32[] each. Its centre is uniform over the pixels of the image."""
    row, column = jax.random.randint(key, (2,), 0, jnp.array([image_height, image_width]), jnp.int32)
    return Box(row - height // 2, column - width // 2, height, width)


def check_side(key: str, pixels: int, image: jax.Array) -> None:
    """Raise `InputError` if `data.augment.KEY` is larger than the shorter side of an image, [H, W, C]."""
    side = min(image.shape[:2])
    if pixels > side:
        raise InputError(
            Key(f"data.augment.{key}", pixels), f": expected 0 to {side} pixels, at most the image's shorter side"
        )
