"""Apply an operation to an image."""

import jax

from jaxddp.augment.ops.blend import blend
from jaxddp.augment.ops.look_up import look_up
from jaxddp.augment.ops.pixel_operation import PixelOperation
from jaxddp.augment.ops.warp import warp


def operate(planes: jax.Array, operation: PixelOperation) -> jax.Array:
    """Apply one operation to one image, uint8[C, H, W]; C is 1 or 3."""
    return blend(look_up(warp(planes, operation), operation), operation)
