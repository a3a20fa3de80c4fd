"""An operation of an augmentation policy, and the order of its parts.

Under `vmap`, `jax.lax.switch` would compute every operation for every image. So `operate` computes a warp, a table
lookup and a blend once each. One of these three performs the drawn operation, and the parameters of the other two leave
the image unchanged.

Pixels and positions are computed in integers, with fractions in units of 1/`ONE`, so results are the same on any
device. Operations use images with the channels first, [C, H, W]. A TPU pads the last axis to a multiple of 128, so an
image with three channels last would take 43 times its memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError, Key

OPERATIONS = (
    *("identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize"),
    *("contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
"""The 14 operations of RandAugment and TrivialAugment, in the order of the RandAugment paper."""
SOLARIZE_ADD = len(OPERATIONS)
"""The number of an operation of timm's RandAugment: brighten the pixels below 128."""
ONE = 1 << 16
"""The unit of a fraction."""


class PixelOperation(NamedTuple):
    """Operations with their parameters, int32[] or int32[n] each. Those of other operations do not change an image.

    Attributes:
        operation: the index in `OPERATIONS`, or `SOLARIZE_ADD`.
        cos, sin: of the angle of the rotation, in units of 1/`ONE`.
        shear_x, shear_y: the shear along each axis, in units of 1/`ONE`.
        translate_x, translate_y: the translation along each axis, in pixels.
        threshold: solarize inverts pixels of this value and above.
        dropped: the number of lower bits that posterize sets to 0.
        factor: the weight of the image in a blend, in units of 1/`ONE`.
        added: the value that `SOLARIZE_ADD` adds.
    """

    operation: jax.Array
    cos: jax.Array
    sin: jax.Array
    shear_x: jax.Array
    shear_y: jax.Array
    translate_x: jax.Array
    translate_y: jax.Array
    threshold: jax.Array
    dropped: jax.Array
    factor: jax.Array
    added: jax.Array

    def matches(self, *names: str) -> list[jax.Array]:
        """Return, for each name of `OPERATIONS` or "solarize_add", bool[]: whether this operation was drawn."""
        return [self.operation == number_of(name) for name in names]


def number_of(name: str) -> int:
    """Return the number of an operation: its index in `OPERATIONS`, or `SOLARIZE_ADD`."""
    return SOLARIZE_ADD if name == "solarize_add" else OPERATIONS.index(name)


def check_pixels(setting: Key, image: jax.Array, advice: str) -> None:
    """Check that an augmentation can process an image, [H, W, C].

    Args:
        setting: the key that enables the augmentation, with its value.
        advice: the correction, if the images are unsuitable.

    Raises:
        InputError: the image has not 1 or 3 channels, or is not uint8.
    """
    if image.shape[-1] not in (1, 3):
        raise InputError(
            setting, f": needs images with 1 or 3 channels, and these have {image.shape[-1]}", advice=advice
        )
    if image.dtype == jnp.uint16:
        raise InputError(setting, ": needs 8-bit pixels, and the images have 16 bits", advice=advice)
    if image.dtype != jnp.uint8:
        raise InputError(setting, f": needs pixels, and the images are normalized {image.dtype}", advice=advice)
