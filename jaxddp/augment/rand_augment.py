"""RandAugment: random operations with one magnitude (Cubuk et al. 2020, arXiv:1909.13719).

Under `vmap`, `jax.lax.switch` would compute every operation for every image. So each layer computes a warp, a table
lookup and a blend once each. One of these three performs the drawn operation, and the parameters of the other two leave
the image unchanged.

The ranges are those of AutoAugment (Cubuk et al. 2019, arXiv:1805.09501). At magnitude 0 an operation has no effect. At
the largest magnitude the parameters are: rotate 30 degrees, shear 0.3, translate 150/331 of the side, solarize
threshold 0 (from 256), posterize 4 bits (from 8), blend factor 0.9 away from 1. Results equal Pillow's (ImageOps,
ImageEnhance, nearest neighbour), except that a blend is rounded instead of truncated.

Pixels and positions are computed in integers, with fractions in units of 1/65,536, so results are the same on any
device. Operations use images with the channels first, [C, H, W]. A TPU pads the last axis to a multiple of 128, so an
image with three channels last would take 43 times its memory.
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
"""The 14 operations of the paper, in its order."""
LARGEST = 10
FILL = 128
"""The gray that fills pixels outside a warped image, as in the authors' code."""

_ONE = 1 << 16
_LUMA = (19595, 38470, 7471)
"""The weights of red, green and blue (ITU-R 601-2)."""


class Drawn(NamedTuple):
    """The operation that was drawn, with its direction and magnitude."""

    operation: jax.Array
    """int32[], the index in OPERATIONS."""
    sign: jax.Array
    """int32[], 1 or -1: the direction of a warp, or a blend away from (1) or towards (-1) the degenerate image."""
    share: float
    """The magnitude as a fraction of `LARGEST`, 0 to 1."""

    def matches(self, *names: str) -> list[jax.Array]:
        """Return, for each name, bool[]: whether this operation was drawn."""
        return [self.operation == OPERATIONS.index(name) for name in names]

    def signed(self, name: str, amount: float) -> jax.Array:
        """Return the rounded amount times `sign`, int32[], or 0 if another operation than `name` was drawn."""
        return jnp.where(self.matches(name)[0], self.sign * round(amount), 0)


@AUGMENTATIONS.add("rand_augment")
def from_settings(settings: AugmentConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return RandAugment with the config's layers and magnitude; see `rand_augment`."""
    layers, magnitude = settings.rand_augment, settings.rand_magnitude

    def apply(key: jax.Array, image: jax.Array) -> jax.Array:
        if image.shape[-1] not in (1, 3):
            raise InputError(
                Key("data.augment.rand_augment", layers),
                f": needs images with 1 or 3 channels, and these have {image.shape[-1]}",
                advice="give 0",
            )
        if image.dtype == jnp.uint16:
            raise InputError(
                Key("data.augment.rand_augment", layers),
                ": needs 8-bit pixels, and the images have 16 bits",
                advice="give 0",
            )
        if image.dtype != jnp.uint8:
            raise InputError(
                f"rand_augment needs uint8 pixels, and the images are {image.dtype} after normalization",
                advice=(
                    "set ",
                    Key("data.augment.rand_augment"),
                    " instead of naming it in ",
                    Key("data.augment.then"),
                ),
            )
        return rand_augment(key, image, layers, magnitude)

    return apply


def rand_augment(key: jax.Array, image: jax.Array, layers: int, magnitude: float) -> jax.Array:
    """Apply `layers` random operations to uint8[H, W, C], each uniform among `OPERATIONS`, in a random direction."""
    operation_key, sign_key = jax.random.split(key)
    operations = jax.random.randint(operation_key, (layers,), 0, len(OPERATIONS), jnp.int32)
    signs = jax.random.rademacher(sign_key, (layers,), jnp.int32)

    def layer(planes: jax.Array, drawn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return _operate(planes, Drawn(*drawn, magnitude / LARGEST)), None

    # The layers run in a loop, so the compile time does not grow with their number.
    return jnp.moveaxis(jax.lax.scan(layer, jnp.moveaxis(image, -1, 0), (operations, signs))[0], 0, -1)


def operate(image: jax.Array, drawn: Drawn) -> jax.Array:
    """Apply one operation to one image, uint8[H, W, C]; C is 1 or 3."""
    return jnp.moveaxis(_operate(jnp.moveaxis(image, -1, 0), drawn), 0, -1)


def _operate(planes: jax.Array, drawn: Drawn) -> jax.Array:
    """Apply one operation to uint8[C, H, W]."""
    return _blend(_look_up(_warp(planes, drawn), drawn), drawn)


def _warp(image: jax.Array, drawn: Drawn) -> jax.Array:
    """Warp an image by nearest neighbour: each pixel gets the value at the source position of its centre.

    Rotation is counter-clockwise about the image's centre. Shear moves a row or column by a fraction of its distance
    from the top or left border. Translation is by whole pixels.
    """
    _, height, width = image.shape
    angle, shear = math.radians(30 * drawn.share), _ONE * 0.3 * drawn.share
    cos = jnp.where(drawn.matches("rotate")[0], round(_ONE * math.cos(angle)), _ONE)
    sin = drawn.signed("rotate", _ONE * math.sin(angle))
    # Twice the position of the centre of each pixel, because these are integers.
    y, x = 2 * jnp.arange(height, dtype=jnp.int32)[:, None] + 1, 2 * jnp.arange(width, dtype=jnp.int32) + 1
    down, right = y - height, x - width
    row = sin * right + cos * down + drawn.signed("shear_y", shear) * x + _ONE * height
    column = cos * right - sin * down + drawn.signed("shear_x", shear) * y + _ONE * width
    row = row // (2 * _ONE) + drawn.signed("translate_y", 150 / 331 * height * drawn.share)
    column = column // (2 * _ONE) + drawn.signed("translate_x", 150 / 331 * width * drawn.share)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    moved = image.at[:, row, column].get(mode="clip")
    return jnp.where(inside, moved, FILL).astype(image.dtype)


def _look_up(image: jax.Array, drawn: Drawn) -> jax.Array:
    """Map the values of each channel by a lookup table."""
    channels = len(image)
    # On a CPU, counting and lookup on one flat axis are several times faster than on two axes (channel and value).
    indices = (image.astype(jnp.int32) + 256 * jnp.arange(channels, dtype=jnp.int32)[:, None, None]).reshape(-1)
    histogram = jnp.zeros(256 * channels, jnp.int32).at[indices].add(1, mode="promise_in_bounds")
    histogram = histogram.reshape(channels, 256)
    values = jnp.arange(256, dtype=jnp.int32)
    threshold, dropped = round(256 * (1 - drawn.share)), round(4 * drawn.share)
    tables = {
        "autocontrast": jax.vmap(_autocontrast_table)(histogram),
        "equalize": jax.vmap(_equalize_table)(histogram),
        "solarize": jnp.where(values < threshold, values, 255 - values),
        "posterize": values >> dropped << dropped,
    }
    shaped = [jnp.broadcast_to(table, histogram.shape) for table in tables.values()]
    table = jnp.select(drawn.matches(*tables), shaped, values).astype(image.dtype)
    return table.reshape(-1).at[indices].get(mode="promise_in_bounds").reshape(image.shape)


def _autocontrast_table(histogram: jax.Array) -> jax.Array:
    """Return the lookup table of autocontrast, int32[256]: the darkest value becomes 0, the brightest 255.

    An image with a single value is not changed.
    """
    values = jnp.arange(256, dtype=jnp.int32)
    low, high = _value_range(histogram)
    stretched = (values - low) * 255 // jnp.maximum(high - low, 1)
    return jnp.where(high > low, jnp.clip(stretched, 0, 255), values)


def _equalize_table(histogram: jax.Array) -> jax.Array:
    """Return the lookup table of equalize, int32[256]: a value becomes the number of darker pixels, scaled to 255."""
    _, high = _value_range(histogram)
    step = (histogram.sum() - histogram[high]) // 255
    below = jnp.cumsum(histogram) - histogram
    spread = (step // 2 + below) // jnp.maximum(step, 1)
    return jnp.where(step > 0, jnp.minimum(spread, 255), jnp.arange(256))


def _value_range(histogram: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the darkest and the brightest value of a histogram."""
    occurs = histogram > 0
    return jnp.argmax(occurs), 255 - jnp.argmax(occurs[::-1])


def _blend(image: jax.Array, drawn: Drawn) -> jax.Array:
    """Compute degenerate + factor * (image - degenerate), where degenerate is an image without colour, contrast, …."""
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
    degenerate = jnp.select(drawn.matches(*degenerates), shaped, pixels)
    factor = _ONE + drawn.sign * round(_ONE * 0.9 * drawn.share)
    blended = degenerate + (factor * (pixels - degenerate) + _ONE // 2) // _ONE
    return jnp.clip(blended, 0, 255).astype(image.dtype)


def _gray(pixels: jax.Array) -> jax.Array:
    """Return the luma of an image, int32[1, H, W]."""
    if len(pixels) == 1:
        return pixels
    return ((pixels * jnp.array(_LUMA, jnp.int32)[:, None, None]).sum(0, keepdims=True) + _ONE // 2) // _ONE


def _smooth(pixels: jax.Array) -> jax.Array:
    """Average each pixel (weight 5) with its eight neighbours (weight 1). Pixels at the border are not changed."""
    rows = pixels[:, :-2] + pixels[:, 1:-1] + pixels[:, 2:]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = pixels[:, 1:-1, 1:-1]
    return pixels.at[:, 1:-1, 1:-1].set((around + 4 * inner + 6) // 13)
