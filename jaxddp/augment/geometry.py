"""Augmentations that move or fill pixels: flips, crops, cutout, random erasing, resizing, and views for evaluation."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxddp.config import AugmentConfig
from jaxddp.config.registry import AUGMENTATIONS
from jaxddp.core.errors import InputError, Key


class Box(NamedTuple):
    """A rectangle with fields int32[]. It may extend beyond the image; pixels outside the image are ignored."""

    top: jax.Array
    left: jax.Array
    height: jax.Array
    width: jax.Array

    def mask(self, height: int, width: int) -> jax.Array:
        """Return a mask, bool[height, width], of the pixels of an image that are in the box."""
        row, column = jnp.arange(height)[:, None] - self.top, jnp.arange(width)[None] - self.left
        return (row >= 0) & (row < self.height) & (column >= 0) & (column < self.width)


def centered(key: jax.Array, image_height: int, image_width: int, height: jax.Array, width: jax.Array) -> Box:
    """Draw a box of this height and width, int32[] each. Its centre is uniform over the pixels of the image."""
    row, column = jax.random.randint(key, (2,), 0, jnp.array([image_height, image_width]), jnp.int32)
    return Box(row - height // 2, column - width // 2, height, width)


def check_side(key: str, pixels: int, image: jax.Array) -> None:
    """Raise `InputError` if `data.augment.KEY` is larger than the shorter side of an image, [H, W, C]."""
    if pixels > (side := min(image.shape[:2])):
        expected = f": expected 0 to {side} pixels, at most the image's shorter side"
        raise InputError(Key(f"data.augment.{key}", pixels), expected)


def flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Flip an image [H, W, C] left to right with probability 1/2."""
    return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image)


def vertical_flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Flip an image [H, W, C] top to bottom with probability 1/2."""
    return jnp.where(jax.random.bernoulli(key), image[::-1], image)


def alternate_flip(key: jax.Array, epoch: jax.Array, image: jax.Array) -> jax.Array:
    """Flip an image [H, W, C] left to right in every other epoch (Jordan 2024, arXiv:2404.00498, section 3.6).

    In a short run, the two versions of an image appear more equally often than with random flips.

    Args:
        key: the same random key in all epochs. The image is flipped in epoch 0 with probability 1/2.
    """
    return jnp.where(jax.random.bernoulli(key) ^ (epoch % 2 == 1), image[:, ::-1], image)


AUGMENTATIONS.add("vertical_flip")(lambda settings: vertical_flip)


def padded_crop(key: jax.Array, image: jax.Array, settings: AugmentConfig) -> jax.Array:
    """Pad an image [H, W, C] by `settings.pad` with black or reflected pixels, and crop it at a random position."""
    pad, mode = settings.pad, "reflect" if settings.border == "reflect" else "constant"
    check_side("pad", pad, image)
    top, left = jax.random.randint(key, (2,), 0, 2 * pad + 1)
    return jax.lax.dynamic_slice(jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode), (top, left, 0), image.shape)


def area_crop(key: jax.Array, image: jax.Array) -> jax.Array:
    """Resize a random area of an image [H, W, C], 20% to 100% of its own, to its size, bilinearly.

    The aspect ratio, relative to the image's, is log-uniform from 3/4 to 4/3 (as in SimSiam, arXiv:2011.10566). The
    first of `TRIES` draws that fits the image is used, as in torchvision.
    """
    area, aspect, *place = jax.random.uniform(key, (4, TRIES), jnp.float32)
    sides = jnp.sqrt((0.2 + 0.8 * area) * (3 / 4) ** jnp.stack([2 * aspect - 1, 1 - 2 * aspect]))
    first = jnp.argmax((sides <= 1).all(0))
    sides = jnp.minimum(sides[:, first], 1)
    starts = jnp.stack(place)[:, first] * (1 - sides) * jnp.array(image.shape[:2])
    arguments = image.astype(jnp.float32), image.shape, (0, 1), 1 / sides, -starts / sides
    return _levels(jax.image.scale_and_translate(*arguments, "linear", antialias=False), image.dtype)


AUGMENTATIONS.add("area_crop")(lambda settings: area_crop)


ASPECT = (0.3, 1 / 0.3)
TRIES = 10


def cutout(key: jax.Array, image: jax.Array, settings: AugmentConfig) -> jax.Array:
    """Set a square of an image, uint8[H, W, C], to 0 (cutout, DeVries & Taylor 2017, arXiv:1708.04552).

    The side of the square is `settings.cutout`. Its centre is uniform over the pixels of the image. The authors set
    normalized images to 0, the mean colour.
    """
    check_side("cutout", settings.cutout, image)
    height, width, _ = image.shape
    side = jnp.int32(settings.cutout)
    square = centered(key, height, width, side, side)
    return jnp.where(square.mask(height, width)[..., None], 0, image).astype(image.dtype)


def erase(key: jax.Array, image: jax.Array, settings: AugmentConfig) -> jax.Array:
    """Fill a rectangle of a normalized image, float[H, W, C] (random erasing).

    An image is erased with probability `settings.erase`. The fill "mean" is 0, the mean colour, as in torchvision's
    recipes (RE-M of Zhong et al. 2017, arXiv:1708.04896). "noise" draws each value from the standard normal
    distribution, as timm's mode "pixel" does.
    """
    height, width, _ = image.shape
    hit_key, box_key, fill_key = jax.random.split(key, 3)
    is_erased = jax.random.bernoulli(hit_key, jnp.float32(settings.erase))
    fill = jax.random.normal(fill_key, image.shape, image.dtype) if settings.erase_fill == "noise" else 0
    box = erasing_box(box_key, height, width, settings.erase_area)
    return jnp.where(is_erased & box.mask(height, width)[..., None], fill, image)


def erasing_box(key: jax.Array, image_height: int, image_width: int, bounds: tuple[float, float]) -> Box:
    """Draw the rectangle of random erasing. It is completely inside the image, or empty.

    Its share of the area is uniform in `bounds`, its aspect ratio (height / width) log-uniform in `ASPECT`, and its
    position uniform. Wide and tall rectangles are equally likely. The first of `TRIES` draws that fits the image is
    used.
    """
    area, aspect, top, left = jax.random.uniform(key, (4, TRIES), jnp.float32)
    area = (bounds[0] + area * (bounds[1] - bounds[0])) * (image_height * image_width)
    low, high = jnp.log(jnp.array(ASPECT, jnp.float32))
    aspect = jnp.exp(low + aspect * (high - low))
    height, width = (jnp.round(jnp.sqrt(each)).astype(jnp.int32) for each in (area * aspect, area / aspect))
    fits = (height >= 1) & (height <= image_height) & (width >= 1) & (width <= image_width)
    # The product can be rounded up to one more than the last position.
    top = jnp.minimum((top * (image_height - height + 1).astype(top.dtype)).astype(jnp.int32), image_height - height)
    left = jnp.minimum((left * (image_width - width + 1).astype(left.dtype)).astype(jnp.int32), image_width - width)
    first = jnp.argmax(fits)
    size = jnp.where(fits[first], jnp.stack([height, width])[:, first], 0)
    return Box(top[first], left[first], size[0], size[1])


_UPWARD_BIAS = 1 / 32
"""The value that is added before rounding, in levels: above any rounding error, and too small to be visible."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Side:
    """The side, in pixels, to which the images of a batch are resized. Like a shape, it is static under tracing.

    Attributes:
        interpolation: "bilinear" or "bicubic".
    """

    pixels: int
    interpolation: str = "bilinear"


def resized(images: jax.Array, side: Side, dtype: Any) -> jax.Array:
    """Resize pixels [B, H, W, C] to [B, side, side, C] of the same dtype, with floating-point operations in `dtype`.

    The resize is antialiased, by `jax.image.resize`. The mean of a few pixels is often halfway between two levels. Its
    rounding would depend on the last bits of a sum, which may depend on the number of devices. So values near the
    middle are always rounded up.
    """
    shape = (len(images), side.pixels, side.pixels, images.shape[-1])
    means = jax.image.resize(images.astype(dtype), shape, side.interpolation, antialias=True)
    if side.interpolation == "bicubic" and not jnp.issubdtype(images.dtype, jnp.floating):
        # Some weights are negative.
        means = jnp.clip(means, 0, jnp.iinfo(images.dtype).max)
    return _levels(means, images.dtype)


def _levels(means: jax.Array, dtype: Any) -> jax.Array:
    """Return means as pixels of a dtype. Levels are rounded."""
    return (means if jnp.issubdtype(dtype, jnp.floating) else jnp.floor(means + (0.5 + _UPWARD_BIAS))).astype(dtype)
