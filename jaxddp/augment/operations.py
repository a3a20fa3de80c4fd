"""The operations of RandAugment and the policies on one image: warps, table lookups and blends.

Under `vmap`, `jax.lax.switch` would compute every operation for every image. So `operate` computes a warp, a table
lookup and a blend once each. One of these three performs the drawn operation, and the parameters of the other two leave
the image unchanged.

Pixels and positions are computed in integers, with fractions in units of 1/`ONE`, so results are the same on any
device. Operations use images with the channels first, [C, H, W]. A TPU pads the last axis to a multiple of 128, so an
image with three channels last would take 43 times its memory.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

OPERATIONS = (
    *("identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize"),
    *("contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
"""The 14 operations of RandAugment and TrivialAugment, in the order of the RandAugment paper."""
_NUMBERS = {name: number for number, name in enumerate((*OPERATIONS, "solarize_add"))}
"""The numbers of operations. solarize_add, of timm's RandAugment, brightens the pixels below 128."""
BLENDS = ("color", "contrast", "brightness", "sharpness")
SIGNED = (*BLENDS, "rotate", "shear_x", "shear_y", "translate_x", "translate_y")
"""The operations for which the opposite of a magnitude is equally likely."""
ONE = 1 << 16
"""The unit of a fraction."""


class PixelOperation(NamedTuple):
    """Operations with their parameters, int32[] or int32[n] each. Those of other operations do not change an image.

    Attributes:
        operation: the index in `OPERATIONS`, or their number for solarize_add.
        cos, sin: of the angle of the rotation, in units of 1/`ONE`.
        shear_x, shear_y: the shear along each axis, in units of 1/`ONE`.
        translate_x, translate_y: the translation along each axis, in pixels.
        threshold: solarize inverts pixels of this value and above.
        dropped: the number of lower bits that posterize sets to 0.
        factor: the weight of the image in a blend, in units of 1/`ONE`.
        added: the value that solarize_add adds.
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
        return [self.operation == _NUMBERS[name] for name in names]


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
    return blended(pixels, degenerate, operation.factor).astype(image.dtype)


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
    return (gray.sum(dtype=jnp.int32) + gray.size // 2) // gray.size


def _smooth(pixels: jax.Array) -> jax.Array:
    """Average each pixel (weight 5) with its eight neighbours (weight 1). Pixels at the border are not changed."""
    rows = pixels[:, :-2] + pixels[:, 1:-1] + pixels[:, 2:]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = pixels[:, 1:-1, 1:-1]
    return pixels.at[:, 1:-1, 1:-1].set((around + 4 * inner + 6) // 13)


def look_up(image: jax.Array, operation: PixelOperation) -> jax.Array:
    """Map the values of each channel of uint8[C, H, W] by a lookup table."""
    channels = len(image)
    # On a CPU, counting and lookup on one flat axis are several times faster than on two axes (channel and value).
    indices = (image.astype(jnp.int32) + 256 * jnp.arange(channels, dtype=jnp.int32)[:, None, None]).reshape(-1)
    histogram = jnp.zeros(256 * channels, jnp.int32).at[indices].add(1, mode="promise_in_bounds")
    histogram = histogram.reshape(channels, 256)
    values = jnp.arange(256, dtype=jnp.int32)
    tables = {
        "autocontrast": jax.vmap(_autocontrast_table)(histogram),
        "equalize": jax.vmap(_equalize_table)(histogram),
        "solarize": jnp.where(values < operation.threshold, values, 255 - values),
        "posterize": values >> operation.dropped << operation.dropped,
        "solarize_add": jnp.where(values < 128, jnp.minimum(values + operation.added, 255), values),
    }
    shaped = [jnp.broadcast_to(table, histogram.shape) for table in tables.values()]
    table = jnp.select(operation.matches(*tables), shaped, values).astype(image.dtype)
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


def operate(planes: jax.Array, operation: PixelOperation) -> jax.Array:
    """Apply one operation to one image, uint8[C, H, W]; C is 1 or 3."""
    return blend(look_up(warp(planes, operation), operation), operation)


Size = tuple[int, int]
"""(height, width) of an image, in pixels."""
Space = dict[str, np.ndarray]
"""The magnitudes of each operation from which a policy draws, float64[n].

The units are: shear: pixels for each pixel; translate: pixels; rotate: degrees; posterize: the number of upper bits
that are kept; solarize: the lowest value that is inverted; solarize_add: the added value; blends: the distance of the
factor from 1.
"""


def space_of(
    names: Iterable[str],
    steps: np.ndarray,
    others: Space,
    *,
    blends: float = 0.9,
    shear: float = 0.3,
    rotate: float = 30,
) -> Space:
    """Return the magnitudes of operations; 0 for one without a magnitude.

    Args:
        steps: float64[n], the shares of the largest magnitude.
        others: the magnitudes of operations other than blends, shear and rotate.
        blends, shear, rotate: the largest magnitudes of these operations.
    """
    largest = {**dict.fromkeys(BLENDS, blends), "shear_x": shear, "shear_y": shear, "rotate": rotate}
    return {name: others[name] if name in others else largest.get(name, 0) * steps for name in names}


IDENTITY = (_NUMBERS["identity"], ONE, 0, 0, 0, 0, 0, 256, 0, ONE, 0)
"""The parameters that do not change an image."""


def row(name: str, magnitude: float) -> tuple[int, ...]:
    """Return the parameters of an operation, in the order of the fields of `PixelOperation`.

    Args:
        name: a name of `OPERATIONS`, "solarize_add" or "invert".
        magnitude: in the unit of `Space`; negative for the opposite direction. A positive translation moves the image
            to the right or down, as in torchvision.
    """
    if name == "invert":
        name, magnitude = "solarize", 0
    angle = math.radians(magnitude)
    changed = {
        "rotate": {"cos": round(ONE * math.cos(angle)), "sin": round(ONE * math.sin(angle))},
        **{each: {each: round(ONE * magnitude)} for each in ("shear_x", "shear_y")},
        **{each: {each: -int(magnitude)} for each in ("translate_x", "translate_y")},
        "solarize": {"threshold": math.ceil(magnitude)},
        "solarize_add": {"added": round(magnitude)},
        "posterize": {"dropped": 8 - round(magnitude)},
        **{each: {"factor": ONE + round(ONE * magnitude)} for each in BLENDS},
    }
    values = dict(zip(PixelOperation._fields, IDENTITY, strict=True)) | {"operation": _NUMBERS[name]}
    return tuple((values | changed.get(name, {})).values())


def rows(space: Space, name: str) -> list[list[tuple[int, ...]]]:
    """Return the parameters of an operation for each magnitude of its space, in both directions.

    The two directions of an operation without a sign are equal. An operation that is not in the space has no magnitude.
    """
    return [[row(name, each), row(name, -each if name in SIGNED else each)] for each in space.get(name, (0,))]


def drawn(table: np.ndarray, index: jax.Array) -> PixelOperation:
    """Return the rows of a table, int[..., number of parameters], at indices int32[...] of the flat table."""
    return PixelOperation(*jnp.unstack(jnp.array(table.reshape(-1, table.shape[-1]), jnp.int32)[index], axis=-1))


def operate_all(planes: jax.Array, parameters: PixelOperation) -> jax.Array:
    """Apply operations one after the other to uint8[C, H, W].

    Args:
        parameters: int32[n] each.
    """
    # The operations run in a loop, so the compile time does not grow with their number.
    return jax.lax.scan(lambda image, one: (operate(image, one), None), planes, parameters)[0]


def on_planes(function: Callable[..., jax.Array], image: jax.Array, *arguments: Any) -> jax.Array:
    """Apply a function of planes, [C, H, W], and of other arguments to an image, [H, W, C]."""
    return jnp.moveaxis(function(jnp.moveaxis(image, -1, 0), *arguments), 0, -1)
