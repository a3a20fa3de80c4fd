"""Which part of an image is kept: the windows of training and of evaluation.

Random windows are drawn by stateless ops from a key of (seed, epoch, row), so they are the same in every thread and on
every host.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxddp.data.tensorflow_cpu import tf
from jaxddp.errors import InputError

CROP_TRIES = 10


@dataclass(frozen=True)
class Crop:
    """Which part of a training image is kept before it is resized.

    Raises:
        InputError: an unknown kind, or bounds that are out of order.
    """

    kind: Literal["random_area", "whole"] = "random_area"
    """A part of random area and aspect, another one in every epoch; or the image, for crops on the device."""
    area: tuple[float, float] = (0.08, 1.0)
    """The least and the most part of the image's area, within 0..1."""
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """The least and the most width / height of the part."""

    def __post_init__(self) -> None:
        if self.kind not in ("random_area", "whole"):
            raise InputError(f"crop kind {self.kind!r}: use 'random_area' or 'whole'")
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise InputError(
                f"crop area {self.area}: give the least and most part of the image, 0 < least <= most <= 1"
            )
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise InputError(f"crop aspect {self.aspect}: give the least and most width / height, 0 < least <= most")


def example_keys(seed: int, epoch: np.ndarray, row: np.ndarray) -> np.ndarray:
    """The stateless key of each example's appearance, int64[B, 2], by (seed, epoch, row): int32[B] the latter two."""
    return np.stack([np.full(len(row), seed, np.int64), epoch.astype(np.int64) << 32 | row.astype(np.int64)], axis=1)


def random_area_window(size: Any, key: Any, crop: Crop) -> Any:
    """A random part of the image, int32[4] (top, left, height, width): the crop of Inception's training.

    The area is uniform in `crop.area` times the image's, the aspect log-uniform in `crop.aspect`, the place uniform
    among those where the part lies within the image. The first of `CROP_TRIES` draws that fits is taken; if none does,
    the largest central part whose aspect lies within bounds. (Szegedy et al., "Going deeper with convolutions", CVPR
    2015, section 6; the tries and what follows them are those of torchvision's RandomResizedCrop.)
    """
    bounds = tf.constant([crop.area, tuple(map(math.log, crop.aspect)), (0, 1), (0, 1)], tf.float32)
    # A named algorithm: the default may differ between devices and releases.
    draws = tf.random.stateless_uniform([4, CROP_TRIES], key, alg="philox")
    area, log_aspect, top, left = tf.unstack(bounds[:, :1] + draws * (bounds[:, 1:] - bounds[:, :1]))
    full_height, full_width = tf.unstack(tf.cast(size, tf.float32))
    side, stretch = tf.sqrt(area * full_height * full_width), tf.exp(log_aspect / 2)
    height, width = tf.round(side / stretch), tf.round(side * stretch)
    fits = (height >= 1) & (height <= full_height) & (width >= 1) & (width <= full_width)

    # In float32 the product can round up to one past the last place.
    top = tf.minimum(tf.floor(top * (full_height - height + 1)), full_height - height)
    left = tf.minimum(tf.floor(left * (full_width - width + 1)), full_width - width)
    # Falling weights, because argmax may name any of several equal ones.
    first = tf.argmax(tf.cast(fits, tf.int32) * tf.range(CROP_TRIES, 0, -1))
    drawn = tf.cast(tf.stack([top, left, height, width])[:, first], tf.int32)
    return tf.where(fits[first], drawn, _fallback_window(full_height, full_width, crop))


def center_window(size: Any, image_size: int, resize: int) -> Any:
    """The central square of side `short side * image_size / resize`, int32[4] (top, left, height, width)."""
    short = tf.cast(tf.reduce_min(size), tf.float32)
    side = tf.cast(tf.maximum(tf.round(short * (image_size / resize)), 1), tf.int32)
    return tf.stack([(size[0] - side) // 2, (size[1] - side) // 2, side, side])


def whole_window(size: Any) -> Any:
    """All of the image, int32[4] (top, left, height, width)."""
    return tf.stack([0, 0, size[0], size[1]])


def _fallback_window(full_height: Any, full_width: Any, crop: Crop) -> Any:
    height = tf.minimum(full_height, tf.maximum(tf.round(full_width / crop.aspect[0]), 1))
    width = tf.minimum(full_width, tf.maximum(tf.round(full_height * crop.aspect[1]), 1))
    return tf.cast(tf.stack([(full_height - height) // 2, (full_width - width) // 2, height, width]), tf.int32)
