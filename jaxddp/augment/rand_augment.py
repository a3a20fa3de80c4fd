"""RandAugment: operations drawn at random, all of one magnitude (Cubuk et al. 2020, arXiv:1909.13719).

Under `vmap` a switch would compute every operation for every image. So a layer is a warp, a lookup table and a blend,
each computed once with the parameters of what was drawn. Those that were not drawn leave the image as it is.

The ranges are those of AutoAugment (Cubuk et al. 2019, arXiv:1805.09501), each growing with the magnitude from none:
rotate 30 degrees, shear 0.3, translate 150/331 of the side, solarize from 256 down to 0, posterize from 8 to 4 bits,
the factor of a blend 0.9 away from 1. Each operation is Pillow's (ImageOps, ImageEnhance, nearest neighbour), but that
a blend is rounded where Pillow cuts off.

All arithmetic on pixels and places is in integers, fractions in 65,536 parts, so the pixels are the same on any device.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxddp.config import AugmentConfig
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.registry import AUGMENTATIONS

OPERATIONS = (
    *("identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize"),
    *("contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
"""The paper's 14, in its order."""
LARGEST = 10
FILL = 128
"""Gray, outside of a warped image, as in the authors' code."""

_ONE = 1 << 16
_LUMA = (19595, 38470, 7471)
"""Of red, green and blue: ITU-R 601-2."""


class Drawn(NamedTuple):
    """An operation, and how it is to be done."""

    operation: jax.Array
    """int32[], its place in OPERATIONS."""
    sign: jax.Array
    """int32[], 1 or -1: the direction of a warp; whether a blend goes away from the degenerate image or towards it."""
    share: float
    """The magnitude, 0 to 1."""

    def among(self, *names: str) -> list[jax.Array]:
        """bool[] for each name: whether it was drawn."""
        return [self.operation == OPERATIONS.index(name) for name in names]

    def signed(self, name: str, amount: float) -> jax.Array:
        """int32[]: an amount rounded, in the direction drawn; 0 where another operation was drawn."""
        return jnp.where(self.among(name)[0], self.sign * round(amount), 0)


@AUGMENTATIONS.add("rand_augment")
def from_settings(settings: AugmentConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """With the config's layers and magnitude; see `rand_augment`."""
    layers, magnitude = settings.rand_augment, settings.rand_magnitude

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        if image.shape[-1] not in (1, 3):
            raise InputError(
                Key("data.augment.rand_augment", layers),
                f": its colours are defined for 1 or 3 channels, and the images have {image.shape[-1]}",
                advice="give 0",
            )
        if image.dtype == jnp.uint16:
            raise InputError(
                Key("data.augment.rand_augment", layers),
                ": takes pixels of 8 bits, and the images have 16",
                advice="give 0",
            )
        if image.dtype != jnp.uint8:
            raise InputError(
                f"rand_augment takes uint8 pixels, and the images are {image.dtype} here",
                advice=(
                    "set ",
                    Key("data.augment.rand_augment"),
                    " in place of naming it in ",
                    Key("data.augment.then"),
                ),
            )
        return rand_augment(key, image, layers, magnitude)

    return apply


def rand_augment(key: jax.Array, image: jax.Array, layers: int, magnitude: float) -> jax.Array:
    """`layers` operations on uint8[H, W, C], each any of `OPERATIONS` with equal chance, in either direction."""
    which, direction = jax.random.split(key)
    operations = jax.random.randint(which, (layers,), 0, len(OPERATIONS), jnp.int32)
    signs = jax.random.rademacher(direction, (layers,), jnp.int32)

    def layer(image: jax.Array, drawn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return operate(image, Drawn(*drawn, magnitude / LARGEST)), None

    # A loop rather than its body several times: the program is compiled as quickly for any number of layers.
    return jax.lax.scan(layer, image, (operations, signs))[0]


def operate(image: jax.Array, drawn: Drawn) -> jax.Array:
    """One operation on one image, uint8[H, W, C], C of 1 or 3."""
    return _blend(_look_up(_warp(image, drawn), drawn), drawn)


def _warp(image: jax.Array, drawn: Drawn) -> jax.Array:
    """Each pixel is that on which its centre's source lies.

    Rotation is about the image's middle, counter-clockwise; shearing moves a row or column by a part of its distance
    from the top or left border; translation is by whole pixels.
    """
    height, width, _ = image.shape
    angle, shear = math.radians(30 * drawn.share), _ONE * 0.3 * drawn.share
    cos = jnp.where(drawn.among("rotate")[0], round(_ONE * math.cos(angle)), _ONE)
    sin = drawn.signed("rotate", _ONE * math.sin(angle))
    # Twice the place of a pixel's centre is a whole number.
    y, x = 2 * jnp.arange(height, dtype=jnp.int32)[:, None] + 1, 2 * jnp.arange(width, dtype=jnp.int32) + 1
    down, right = y - height, x - width
    row = sin * right + cos * down + drawn.signed("shear_y", shear) * x + _ONE * height
    column = cos * right - sin * down + drawn.signed("shear_x", shear) * y + _ONE * width
    row = row // (2 * _ONE) + drawn.signed("translate_y", 150 / 331 * height * drawn.share)
    column = column // (2 * _ONE) + drawn.signed("translate_x", 150 / 331 * width * drawn.share)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    moved = image.at[row, column].get(mode="clip")
    return jnp.where(inside[..., None], moved, FILL).astype(image.dtype)


def _look_up(image: jax.Array, drawn: Drawn) -> jax.Array:
    """Each value becomes another, by a table for each channel."""
    channels = image.shape[-1]
    # Of one axis, counting and looking up are several times quicker on a CPU than of a channel and a value.
    places = (image.astype(jnp.int32) + 256 * jnp.arange(channels, dtype=jnp.int32)).reshape(-1)
    histogram = jnp.zeros(256 * channels, jnp.int32).at[places].add(1, mode="promise_in_bounds")
    histogram = histogram.reshape(channels, 256)
    values = jnp.arange(256, dtype=jnp.int32)
    threshold, dropped = round(256 * (1 - drawn.share)), round(4 * drawn.share)
    tables = {
        "autocontrast": jax.vmap(_stretched)(histogram),
        "equalize": jax.vmap(_equalized)(histogram),
        "solarize": jnp.where(values < threshold, values, 255 - values),
        "posterize": values >> dropped << dropped,
    }
    shaped = [jnp.broadcast_to(table, histogram.shape) for table in tables.values()]
    table = jnp.select(drawn.among(*tables), shaped, values).astype(image.dtype)
    return table.reshape(-1).at[places].get(mode="promise_in_bounds").reshape(image.shape)


def _stretched(histogram: jax.Array) -> jax.Array:
    """Autocontrast, int32[256]: the darkest value becomes 0, the brightest 255; an image of one value stays."""
    values = jnp.arange(256, dtype=jnp.int32)
    low, high = _ends(histogram)
    stretched = (values - low) * 255 // jnp.maximum(high - low, 1)
    return jnp.where(high > low, jnp.clip(stretched, 0, 255), values)


def _equalized(histogram: jax.Array) -> jax.Array:
    """Equalize, int32[256]: each value becomes the number of pixels below it, in 255 steps of equally many."""
    _, high = _ends(histogram)
    step = (histogram.sum() - histogram[high]) // 255
    below = jnp.cumsum(histogram) - histogram
    spread = (step // 2 + below) // jnp.maximum(step, 1)
    return jnp.where(step > 0, jnp.minimum(spread, 255), jnp.arange(256))


def _ends(histogram: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The darkest and the brightest value that occurs."""
    occurs = histogram > 0
    return jnp.argmax(occurs), 255 - jnp.argmax(occurs[::-1])


def _blend(image: jax.Array, drawn: Drawn) -> jax.Array:
    """degenerate + factor * (image - degenerate): away from an image without colour, contrast, …, or towards it."""
    pixels = image.astype(jnp.int32)
    gray = _gray(pixels)
    count = gray.size
    degenerates = {
        "color": gray,
        "contrast": (gray.sum(dtype=jnp.int32) + count // 2) // count,
        "brightness": jnp.int32(0),
        "sharpness": _smooth(pixels),
    }
    shaped = [jnp.broadcast_to(degenerate, image.shape) for degenerate in degenerates.values()]
    degenerate = jnp.select(drawn.among(*degenerates), shaped, pixels)
    factor = _ONE + drawn.sign * round(_ONE * 0.9 * drawn.share)
    blended = degenerate + (factor * (pixels - degenerate) + _ONE // 2) // _ONE
    return jnp.clip(blended, 0, 255).astype(image.dtype)


def _gray(pixels: jax.Array) -> jax.Array:
    """int32[H, W, 1]: luma."""
    if pixels.shape[-1] == 1:
        return pixels
    return ((pixels * jnp.array(_LUMA, jnp.int32)).sum(-1, keepdims=True) + _ONE // 2) // _ONE


def _smooth(pixels: jax.Array) -> jax.Array:
    """Each pixel with its eight neighbours, itself counted five times; the outermost stay as they are."""
    rows = pixels[:-2] + pixels[1:-1] + pixels[2:]
    around = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
    inner = pixels[1:-1, 1:-1]
    return pixels.at[1:-1, 1:-1].set((around + 4 * inner + 6) // 13)
