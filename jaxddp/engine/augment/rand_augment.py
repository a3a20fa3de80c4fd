"""RandAugment: operations drawn at random, all of one magnitude (Cubuk et al. 2020, arXiv:1909.13719).

Under `vmap` a switch would compute every operation for every image. So a layer is three units, each computed once with
the parameters of what was drawn: a warp, a lookup table, a blend. Those that were not drawn leave the image as it is.

The ranges are those of AutoAugment (Cubuk et al. 2019, arXiv:1805.09501), each growing with the magnitude from none:
rotate 30 degrees, shear 0.3, translate 150/331 of the side, solarize from 256 down to 0, posterize from 8 to 4 bits,
the factor of a blend 0.9 away from 1. Each operation is Pillow's (ImageOps, ImageEnhance, nearest neighbour), but that
a blend is rounded where Pillow cuts off.
"""

import math

import jax
import jax.numpy as jnp

OPERATIONS = (
    *("identity", "autocontrast", "equalize", "rotate", "solarize", "color", "posterize"),
    *("contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
)
"""The paper's 14, in its order."""
LARGEST = 10
FILL = 128
"""Where a warp shows what is outside of the image: gray, as in the authors' code."""

_ROTATE, _SHEAR, _TRANSLATE = math.radians(30), 0.3, 150 / 331
_BITS, _BLEND = 4, 0.9
_LUMA = (19595, 38470, 7471)
"""Of red, green and blue in 65,536 parts: ITU-R 601-2, as Pillow rounds it."""

Drawn = dict[str, jax.Array]
"""bool[] for each operation; one is true."""


def rand_augment(key: jax.Array, image: jax.Array, layers: int, magnitude: float) -> jax.Array:
    """`layers` operations one after the other, each any of `OPERATIONS` with equal chance, in either direction.

    Args:
        image: uint8[H, W, C], C of 1 or 3.
        magnitude: 0 to `LARGEST`.
    """
    for layer in range(layers):
        which, direction = jax.random.split(jax.random.fold_in(key, layer))
        operation = jax.random.randint(which, (), 0, len(OPERATIONS), jnp.int32)
        sign = jnp.where(jax.random.bernoulli(direction), jnp.float32(1), jnp.float32(-1))
        image = operate(image, operation, sign * jnp.float32(magnitude / LARGEST))
    return image


def operate(image: jax.Array, operation: jax.Array, strength: jax.Array) -> jax.Array:
    """One operation on one image.

    Args:
        image: uint8[H, W, C], C of 1 or 3.
        operation: int32[], its place in `OPERATIONS`.
        strength: float32[], the share of the largest magnitude, -1 to 1; its sign is the direction of what has one:
            the warps, and blends (towards the degenerate image where negative).
    """
    drawn = {name: operation == place for place, name in enumerate(OPERATIONS)}
    image = _warp(image, drawn, strength)
    image = _look_up(image, drawn, jnp.abs(strength))
    return _blend(image, drawn, strength)


def _warp(image: jax.Array, drawn: Drawn, strength: jax.Array) -> jax.Array:
    """Each pixel is that on which its centre's source lies.

    Rotation is about the image's middle, counter-clockwise; shearing moves a row or column by its distance from the
    top or left border; translation is by whole pixels.
    """
    height, width, _ = image.shape

    def amount(name: str, largest: float) -> jax.Array:
        return jnp.where(drawn[name], strength * largest, 0)

    angle = amount("rotate", _ROTATE)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    y, x = jnp.arange(height, dtype=jnp.float32)[:, None] + 0.5, jnp.arange(width, dtype=jnp.float32) + 0.5
    down, right = y - height / 2, x - width / 2
    row = height / 2 + sin * right + cos * down + amount("shear_y", _SHEAR) * x
    column = width / 2 + cos * right - sin * down + amount("shear_x", _SHEAR) * y
    row += jnp.round(amount("translate_y", _TRANSLATE * height))
    column += jnp.round(amount("translate_x", _TRANSLATE * width))
    row, column = jnp.floor(row).astype(jnp.int32), jnp.floor(column).astype(jnp.int32)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    moved = image.at[row, column].get(mode="clip")
    return jnp.where(inside[..., None], moved, FILL).astype(image.dtype)


def _look_up(image: jax.Array, drawn: Drawn, strength: jax.Array) -> jax.Array:
    """Each value becomes another, by a table for each channel."""
    pixels = image.reshape(-1, image.shape[-1])
    values = jnp.arange(256, dtype=jnp.int32)[:, None]
    threshold = jnp.round(256 * (1 - strength)).astype(jnp.int32)
    dropped = jnp.round(_BITS * strength).astype(jnp.int32)
    tables = {
        "autocontrast": _stretched(pixels, values),
        "equalize": _equalized(pixels, values),
        "solarize": jnp.where(values < threshold, values, 255 - values),
        "posterize": values >> dropped << dropped,
    }
    table = jnp.select([drawn[name] for name in tables], list(tables.values()), values).astype(image.dtype)
    return jnp.take_along_axis(table, pixels.astype(jnp.int32), axis=0).reshape(image.shape)


def _stretched(pixels: jax.Array, values: jax.Array) -> jax.Array:
    """Autocontrast: a channel's darkest value becomes 0, its brightest 255; a channel of one value stays."""
    low, high = pixels.min(0).astype(jnp.int32), pixels.max(0).astype(jnp.int32)
    stretched = (values - low) * 255 // jnp.maximum(high - low, 1)
    return jnp.where(high > low, jnp.clip(stretched, 0, 255), values)


def _equalized(pixels: jax.Array, values: jax.Array) -> jax.Array:
    """Equalize: each value becomes the share of the channel's pixels below it, in steps of equally many pixels."""
    count, channels = pixels.shape
    histogram = jnp.zeros((256, channels), jnp.int32).at[pixels, jnp.arange(channels)].add(1)
    brightest = jnp.take_along_axis(histogram, pixels.max(0, keepdims=True).astype(jnp.int32), axis=0)
    step = (count - brightest) // 255
    below = jnp.cumsum(histogram, axis=0) - histogram
    spread = (step // 2 + below) // jnp.maximum(step, 1)
    return jnp.where(step > 0, jnp.minimum(spread, 255), values)


def _blend(image: jax.Array, drawn: Drawn, strength: jax.Array) -> jax.Array:
    """degenerate + factor * (image - degenerate): nearer to an image without colour, contrast, …, or further away."""
    pixels = image.astype(jnp.int32)
    gray = _gray(pixels)
    count = gray.size
    degenerates = {
        "color": gray,
        "contrast": (gray.sum() + count // 2) // count,
        "brightness": 0,
        "sharpness": _smooth(pixels),
    }
    shaped = [jnp.broadcast_to(degenerate, image.shape) for degenerate in degenerates.values()]
    degenerate = jnp.select([drawn[name] for name in degenerates], shaped, pixels)
    blended = degenerate + (1 + _BLEND * strength) * (pixels - degenerate)
    return jnp.round(jnp.clip(blended, 0, 255)).astype(image.dtype)


def _gray(pixels: jax.Array) -> jax.Array:
    """int32[H, W, 1]: luma."""
    if pixels.shape[-1] == 1:
        return pixels
    return ((pixels * jnp.array(_LUMA, jnp.int32)).sum(-1, keepdims=True) + 0x8000) >> 16


def _smooth(pixels: jax.Array) -> jax.Array:
    """Each pixel with its eight neighbours, itself counted five times; the outermost stay as they are."""
    rows = pixels[:-2] + pixels[1:-1] + pixels[2:]
    around = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
    inner = pixels[1:-1, 1:-1]
    return pixels.at[1:-1, 1:-1].set((around + 4 * inner + 6) // 13)
