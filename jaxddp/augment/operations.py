"""Operations on one image: warps, lookups and blends of RandAugment and the policies, color jitter, blur, grayscale.

Under `vmap`, `jax.lax.switch` would compute every operation for every image. So `operate` computes a warp, a table
lookup and a blend once each. One of these three performs the drawn operation, and the parameters of the other two leave
the image unchanged.

Pixels and positions are computed in integers, with fractions in units of 1/`ONE`, so results are the same on any
device. Operations use images with the channels first, [C, H, W]. A TPU pads the last axis to a multiple of 128, so an
image with three channels last would take 43 times its memory.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.config.registry import AUGMENTATIONS
from jaxddp.core.errors import InputError

OPERATIONS = ("identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize")
OPERATIONS += ("contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y")
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
    degenerates = {"color": gray, "contrast": mean_of(gray), "brightness": jnp.int32(0), "sharpness": _smooth(pixels)}
    shaped = [jnp.broadcast_to(degenerate, image.shape) for degenerate in degenerates.values()]
    degenerate = jnp.select(operation.matches(*degenerates), shaped, pixels)
    return blended(pixels, degenerate, operation.factor).astype(image.dtype)


def blended(pixels: jax.Array, degenerate: jax.Array, factor: jax.Array) -> jax.Array:
    """Return degenerate + factor / ONE * (pixels - degenerate), rounded and clipped to 0..255, int32."""
    return jnp.clip(degenerate + (factor * (pixels - degenerate) + ONE // 2) // ONE, 0, 255)


def gray_of(pixels: jax.Array) -> jax.Array:
    """Return the luma of int32[C, H, W], [1, H, W] of the same dtype. Pixels of 16 bits need uint32."""
    if len(pixels) == 1:
        return pixels
    return ((pixels * jnp.array(_LUMA, pixels.dtype)[:, None, None]).sum(0, keepdims=True) + ONE // 2) // ONE


def mean_of(gray: jax.Array) -> jax.Array:
    """Return the rounded mean of int32[1, H, W], int32[]."""
    height, width = gray.shape[1:]
    rows = gray.sum((0, 2), jnp.int32)  # The sum of a large image does not fit into 32 bits.
    whole, rest = (each.sum(dtype=jnp.int32) for each in (rows // width, rows % width))
    return whole // height + (whole % height * width + rest + gray.size // 2) // gray.size


def _smooth(pixels: jax.Array) -> jax.Array:
    """Average each pixel (weight 5) with its eight neighbours (weight 1). Pixels at the border are not changed."""
    rows = pixels[:, :-2] + pixels[:, 1:-1] + pixels[:, 2:]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    return pixels.at[:, 1:-1, 1:-1].set((around + 4 * pixels[:, 1:-1, 1:-1] + 6) // 13)


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
    spread = (step // 2 + jnp.cumsum(histogram) - histogram) // jnp.maximum(step, 1)
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
    return jnp.where(inside, image.at[:, row, column].get(mode="clip"), FILL).astype(image.dtype)


def operate(planes: jax.Array, operation: PixelOperation) -> jax.Array:
    """Apply one operation to one image, uint8[C, H, W]; C is 1 or 3."""
    return blend(look_up(warp(planes, operation), operation), operation)


Size = tuple[int, ...]
"""(height, width) of an image, in pixels."""
Space = Mapping[str, np.ndarray]
"""The magnitudes of each operation from which a policy draws, float64[n].

The units are: shear: pixels for each pixel; translate: pixels; rotate: degrees; posterize: the number of upper bits
that are kept; solarize: the lowest value that is inverted; solarize_add: the added value; blends: the distance of the
factor from 1.
"""


def space_of(
    names: Iterable[str], steps: np.ndarray, others: Space, largest: tuple = (0.9, 0.3, 30), shift: tuple = (0, 0)
) -> Space:
    """Return the magnitudes of operations; 0 for one without a magnitude.

    Args:
        steps: float64[n], the shares of the largest magnitude.
        others: the magnitudes of other operations than those that follow.
        largest: the largest magnitudes of blends, shear and rotate.
        shift: the largest translations along x and y.
    """
    blends, shear, rotate = largest
    of_others = {**dict.fromkeys(BLENDS, blends), "shear_x": shear, "shear_y": shear, "rotate": rotate}
    of_others |= {"translate_x": shift[0], "translate_y": shift[1]}
    return {name: others[name] if name in others else of_others.get(name, 0) * steps for name in names}


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
    """Apply n operations one after the other to uint8[C, H, W]. Their parameters are int32[n] each."""
    # The operations run in a loop, so the compile time does not grow with their number.
    return jax.lax.scan(lambda image, one: (operate(image, one), None), planes, parameters)[0]


def on_planes(function: Callable[..., jax.Array], image: jax.Array, *arguments: Any) -> jax.Array:
    """Apply a function of planes, [C, H, W], and of other arguments to an image, [H, W, C]."""
    return jnp.moveaxis(function(jnp.moveaxis(image, -1, 0), *arguments), 0, -1)


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
    from_red, from_green, from_blue = green - blue, 2 * chroma + blue - red, 4 * chroma + red - green
    hue = jnp.select([red == value, green == value], [from_red, from_green], from_blue)
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
    in_sector = [sector == index for index in range(5)]
    return jnp.stack([jnp.select(in_sector, list(each[:5]), each[5]) for each in channels])


Strengths = tuple[float, float, float, float]
"""The strengths of brightness, contrast and saturation, 0 to 1, and of hue, 0 to 0.5; 0 for none."""


def color_jitter(key: jax.Array, planes: jax.Array, strengths: Strengths) -> jax.Array:
    """Change uint8[C, H, W] in a random order of the steps whose strength is not 0.

    The factors of brightness, contrast and saturation are uniform in 1 - strength to 1 + strength. The hue is rotated
    by up to `strengths[3]` turns in both directions. Each step rounds to whole levels. Saturation and hue do nothing to
    gray images.
    """
    steps = [index for index in range(4 if len(planes) == 3 else 2) if strengths[index] > 0]
    if not steps:
        return planes
    order, amounts = draw(key, strengths, steps)

    def step(planes: jax.Array, which: jax.Array) -> tuple[jax.Array, None]:
        return adjusted(planes, which, amounts[which], has_hue=3 in steps), None

    return jax.lax.scan(step, planes, order)[0]


def draw(key: jax.Array, strengths: Strengths, steps: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Return a random order of the steps, int32[n], and the amount of each of the four steps, int32[4].

    The amounts are those of `adjusted`. They are drawn as whole numbers, which are the same on any device.
    """
    order_key, amount_key = jax.random.split(key)
    reach = [round((TURN if index == 3 else ONE) * strength) for index, strength in enumerate(strengths)]
    bounds = jnp.array(reach, jnp.int32)
    amounts = jax.random.randint(amount_key, (4,), -bounds, bounds + 1, jnp.int32)
    return jax.random.permutation(order_key, jnp.array(steps, jnp.int32)), amounts


def adjusted(planes: jax.Array, which: jax.Array, amount: jax.Array, *, has_hue: bool = True) -> jax.Array:
    """Change one property of uint8[C, H, W].

    Args:
        which: int32[], 0 for brightness, 1 for contrast, 2 for saturation, 3 for hue.
        amount: int32[], the distance of the factor from 1, in units of 1/`ONE`; of the hue, in units of 1/`TURN` turn.
        has_hue: whether `which` may be 3.
    """
    pixels = planes.astype(jnp.int32)
    gray = gray_of(pixels)
    degenerates = [jnp.zeros_like(pixels), *(jnp.broadcast_to(each, pixels.shape) for each in (mean_of(gray), gray))]
    mixed = blended(pixels, jnp.select([which == index for index in range(3)], degenerates, pixels), ONE + amount)
    if has_hue:
        mixed = jnp.where(which == 3, rotate_hue(pixels, jnp.where(which == 3, amount, 0)), mixed)
    return mixed.astype(planes.dtype)


BLUR_PASSES = 3
_WHOLE = 1 << 24
"""The unit of a weight in Pillow."""


def box_weights(radius: float) -> tuple[int, int, int]:
    """Return the weights of the pixels at distances 0, 1 and 2 in one box blur, in units of 1/2**24.

    The box has the variance radius**2 / 3, so three blurs have the variance of the Gaussian. The outermost pixels have
    a smaller weight than the others, because the radius of the box is not a whole number.

    Args:
        radius: the standard deviation of the Gaussian in pixels, up to 2.4.
    """
    variance = radius * radius / BLUR_PASSES
    whole = int(np.floor((np.sqrt(12 * variance + 1) - 1) / 2))
    rest = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    inner = int(_WHOLE / (2 * (whole + rest) + 1))
    outer = (_WHOLE - (2 * whole + 1) * inner) // 2
    return (inner, outer, 0) if whole == 0 else (inner, inner, outer)


def blur(planes: jax.Array, weights: jax.Array) -> jax.Array:
    """Blur uint8[C, H, W] with the result of `box_weights`. Pixels outside the image equal the nearest border."""
    for axis in (2, 1):
        for _ in range(BLUR_PASSES):
            planes = _box_blur(planes, weights, axis)
    return planes


def _box_blur(planes: jax.Array, weights: jax.Array, axis: int) -> jax.Array:
    size = planes.shape[axis]
    margins = [(2, 2) if each == axis else (0, 0) for each in range(3)]
    padded = jnp.pad(planes, margins, mode="edge").astype(jnp.uint32)
    shifted = [jax.lax.slice_in_dim(padded, start, start + size, axis=axis) for start in range(5)]
    middle, near, far = shifted[2], shifted[1] + shifted[3], shifted[0] + shifted[4]
    # The largest sum is 255.5 * 2**24, which fits into 32 bits.
    total = weights[0] * middle + weights[1] * near + weights[2] * far + _WHOLE // 2
    return (total // _WHOLE).astype(planes.dtype)


GRAY_PROBABILITY = 0.2


def grayscale(key: jax.Array, image: jax.Array) -> jax.Array:
    """With probability 0.2, replace each channel by the gray of all three (as in SimCLR, arXiv:2002.05709).

    The image has pixels uint8 or uint16 [H, W, C], with 1 or 3 channels. Gray is that of Pillow and torchvision.

    Raises: InputError if the image has other channels, or is normalized.
    """
    if image.shape[-1] not in (1, 3) or jnp.issubdtype(image.dtype, jnp.floating):
        raise InputError(f"grayscale needs pixels with 1 or 3 channels, and not {jax.typeof(image)}; leave it out")
    gray = on_planes(gray_of, image.astype(jnp.uint32)).astype(image.dtype)
    return jnp.where(jax.random.bernoulli(key, jnp.float32(GRAY_PROBABILITY)), gray, image)


AUGMENTATIONS.add("grayscale")(lambda settings: grayscale)
