"""An operation of an augmentation policy, and the order of its parts.

Under `vmap`, `jax.lax.switch` would compute every operation for every image. So `operate` computes a warp, a table
lookup and a blend once each. One of these three performs the drawn operation, and the parameters of the other two leave
the image unchanged.

Pixels and positions are computed in integers, with fractions in units of 1/`ONE`, so results are the same on any
device. Operations use images with the channels first, [C, H, W]. A TPU pads the last axis to a multiple of 128, so an
image with three channels last would take 43 times its memory.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key

OPERATIONS = (
    *("identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize"),
    *("contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
"""The 14 operations of RandAugment and TrivialAugment, in the order of the RandAugment paper."""
ONE = 1 << 16
"""The unit of a fraction."""


class PixelOperation(Protocol):
    """A drawn operation with its parameters. Those of other operations have values that do not change an image.

    Attributes:
        cos, sin: of the angle of the rotation, in units of 1/`ONE`.
        shear_x, shear_y: the shear along each axis, in units of 1/`ONE`.
        threshold: solarize inverts pixels of this value and above.
        dropped: the number of lower bits that posterize sets to 0.
        factor: the weight of the image in a blend, in units of 1/`ONE`.
    """

    @property
    def cos(self) -> jax.Array: ...
    @property
    def sin(self) -> jax.Array: ...
    @property
    def shear_x(self) -> jax.Array: ...
    @property
    def shear_y(self) -> jax.Array: ...
    @property
    def threshold(self) -> jax.Array | int: ...
    @property
    def dropped(self) -> jax.Array | int: ...
    @property
    def factor(self) -> jax.Array: ...

    def shift_x(self, width: int) -> jax.Array:
        """Return the translation along the x axis, in pixels, for images of this width."""
        ...

    def shift_y(self, height: int) -> jax.Array:
        """Return the translation along the y axis, in pixels, for images of this height."""
        ...

    def matches(self, *names: str) -> list[jax.Array]:
        """Return, for each name of `OPERATIONS`, bool[]: whether this operation was drawn."""
        ...


def matching(operation: jax.Array, names: tuple[str, ...]) -> list[jax.Array]:
    """Return, for each name, bool[]: whether it is the name of an operation, int32[], an index in `OPERATIONS`."""
    return [operation == OPERATIONS.index(name) for name in names]


def check_pixels(name: str, setting: Key, image: jax.Array, advice: str) -> None:
    """Check that an augmentation can process an image, [H, W, C].

    Args:
        name: the name of the augmentation in `data.augment.then`.
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
        raise InputError(
            f"{name} needs uint8 pixels, and the images are {image.dtype} after normalization",
            advice=("set ", Key(setting.name), " instead of naming it in ", Key("data.augment.then")),
        )
