"""Augmentations of colors: color jitter as in torchvision, Pillow's Gaussian blur, and grayscale."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.augment.operations import ONE, blended, gray_of, mean_of, on_planes
from jaxddp.config.registry import AUGMENTATIONS
from jaxddp.core.errors import InputError

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
    hue = jnp.where(
        red == value, green - blue, jnp.where(green == value, 2 * chroma + blue - red, 4 * chroma + red - green)
    )
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
    return jnp.stack(
        [jnp.select([sector == index for index in range(5)], list(each[:5]), each[5]) for each in channels]
    )


Strengths = tuple[float, float, float, float]
"""The strengths of brightness, contrast and saturation, 0 to 1, and of hue, 0 to 0.5; 0 for none."""


def color_jitter(key: jax.Array, planes: jax.Array, strengths: Strengths) -> jax.Array:
    """Change uint8[C, H, W] in a random order of the steps whose strength is not 0.

    The factors of brightness, contrast and saturation are uniform in 1 - strength to 1 + strength. The hue is rotated
    by up to `strengths[3]` turns in both directions. Each step rounds to whole levels. Saturation and hue do nothing to
    gray images.
    """
    usable = strengths if len(planes) == 3 else strengths[:2]
    steps = [index for index, strength in enumerate(usable) if strength > 0]
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
_HALF = 1 << 23
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
    """Blur uint8[C, H, W]. Pixels outside the image have the value of the nearest border.

    Args:
        weights: uint32[3]; see `box_weights`.
    """
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
    total = weights[0] * middle + weights[1] * near + weights[2] * far + _HALF
    return (total // _WHOLE).astype(planes.dtype)


GRAY_PROBABILITY = 0.2


def grayscale(key: jax.Array, image: jax.Array) -> jax.Array:
    """With probability 0.2, replace each channel by the gray of all three (as in SimCLR, arXiv:2002.05709).

    The image has pixels uint8 or uint16 [H, W, C], with 1 or 3 channels. Gray is that of Pillow and torchvision.

    Raises:
        InputError: the image has other channels, or is normalized.
    """
    if image.shape[-1] not in (1, 3) or jnp.issubdtype(image.dtype, jnp.floating):
        raise InputError(f"grayscale needs pixels with 1 or 3 channels, and not {jax.typeof(image)}; leave it out")
    gray = on_planes(gray_of, image.astype(jnp.uint32)).astype(image.dtype)
    return jnp.where(jax.random.bernoulli(key, jnp.float32(GRAY_PROBABILITY)), gray, image)


AUGMENTATIONS.add("grayscale")(lambda settings: grayscale)
