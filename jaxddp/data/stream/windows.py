"""Windows: the part of an image that training or evaluation keeps, resized to a square, in TensorFlow's graph.

Training draws random windows by stateless ops from a key of (seed, epoch, row), so they are the same in every thread
and on every host. An image that shrinks by a ratio of more than 1.6 is resized by area: an output pixel is the mean of
the input pixels that it covers, as in OpenCV's INTER_AREA. Any other image is resized bilinearly. Up to a ratio of 1.6,
bilinear sampling uses every pixel; its result is as near to that of a Lanczos filter as Pillow's triangle filter
(TensorFlow's `antialias=True`, which took longer than decoding). At larger ratios, bilinear sampling would alias.
benchmarks/RESULTS.md has measurements.

Evaluation resizes the short side and keeps the center, as torchvision's Resize and CenterCrop do, because published
weights expect those pixels. torchvision's filter is a triangle as wide as the scale (antialiased), at subpixel
positions. Resizing and cropping are one step here, which reads only the pixels that the center needs.
"""

import math
from functools import partial
from typing import Any

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.stream.tensorflow_cpu import tf

CROP_TRIES = 10
ASPECT = (3 / 4, 4 / 3)
"""The bounds of width / height of a crop of random area."""
_BILINEAR_TO = 1.6
"""The largest ratio of input length to output length at which an axis is resized bilinearly."""

Area = tuple[float, float]
"""The bounds of the share of the image's area that a crop covers, within 0..1."""


def crop_area(data: DataConfig) -> Area | None:
    """Return the area of a config's training crops; None if images stay whole."""
    return None if data.crop == "whole" else data.area


def example_keys(seed: int, epoch: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return a stateless key for each appearance of an example, int64[B, 2]; epochs and rows are int32[B]."""
    return np.stack([np.full(len(row), seed, np.int64), epoch.astype(np.int64) << 32 | row.astype(np.int64)], axis=1)


def random_area_window(size: Any, key: Any, area: Area) -> Any:
    """Return a random part of the image, int32[4] (top, left, height, width): the crop of Inception's training.

    The area is uniform in `area` times the area of the image, the aspect is log-uniform in `ASPECT`, and the position
    is uniform among the positions inside the image. The first of `CROP_TRIES` draws that fits is used. If none fits,
    the largest central part whose aspect is within the bounds is used. (Szegedy et al., "Going deeper with
    convolutions", CVPR 2015, section 6; the tries and the fallback are those of torchvision's RandomResizedCrop.)
    """
    bounds = tf.constant([area, tuple(map(math.log, ASPECT)), (0, 1), (0, 1)], tf.float32)
    # The algorithm is named, because the default may differ between devices and releases.
    draws = tf.random.stateless_uniform([4, CROP_TRIES], key, alg="philox")
    part, log_aspect, top, left = tf.unstack(bounds[:, :1] + draws * (bounds[:, 1:] - bounds[:, :1]))
    full_height, full_width = tf.unstack(tf.cast(size, tf.float32))
    side, stretch = tf.sqrt(part * full_height * full_width), tf.exp(log_aspect / 2)
    height, width = tf.round(side / stretch), tf.round(side * stretch)
    fits = (height >= 1) & (height <= full_height) & (width >= 1) & (width <= full_width)

    # In float32, the product can be rounded up to one more than the last position.
    top = tf.minimum(tf.floor(top * (full_height - height + 1)), full_height - height)
    left = tf.minimum(tf.floor(left * (full_width - width + 1)), full_width - width)
    # The weights decrease, because argmax may return any of several equal ones.
    first = tf.argmax(tf.cast(fits, tf.int32) * tf.range(CROP_TRIES, 0, -1))
    drawn = tf.cast(tf.stack([top, left, height, width])[:, first], tf.int32)
    return tf.where(fits[first], drawn, _fallback_window(full_height, full_width))


def _fallback_window(full_height: Any, full_width: Any) -> Any:
    height = tf.minimum(full_height, tf.maximum(tf.round(full_width / ASPECT[0]), 1))
    width = tf.minimum(full_width, tf.maximum(tf.round(full_height * ASPECT[1]), 1))
    return tf.cast(tf.stack([(full_height - height) // 2, (full_width - width) // 2, height, width]), tf.int32)


def resize(image: Any, image_size: int) -> Any:
    """Resize [H, W, C] to [image_size, image_size, C] of the same dtype, rounded; an image of that size is unchanged.

    If one axis is shrunk by area, the other axis is shrunk by area too, unless it is enlarged.
    """
    shape, square = tf.shape(image)[:2], [image_size, image_size]
    sampled = partial(tf.raw_ops.ResizeBilinear, size=square, half_pixel_centers=True)
    pixels = tf.cond(
        tf.reduce_any(shape > int(_BILINEAR_TO * image_size)),
        lambda: sampled(images=tf.raw_ops.ResizeArea(images=image[None], size=tf.minimum(shape, image_size))),
        lambda: sampled(images=image[None]),
    )
    # Every value is a mean of pixels, so its rounded value is in the range of the dtype.
    return tf.ensure_shape(tf.cast(tf.round(pixels[0]), image.dtype), [*square, image.shape[-1]])


def center_box(size: Any, image_size: int, resize: int) -> Any:
    """Return the part of an image that the center crop covers, float64[2, 2], in pixels of the image.

    The first axis is (start, stop), the second (rows, columns). The short side is resized to `resize` pixels, the long
    side to a whole number, rounded down. The crop takes the central `image_size` pixels of both sides; its start is
    whole, with halves rounded to even. (torchvision 0.29's Resize and CenterCrop.)

    Args:
        size: int32[2], height and width of the image.
    """
    size = tf.cast(size, tf.int64)
    resized = resize * size // tf.reduce_min(size)
    spare = resized - image_size
    start = spare // 2 + tf.cast(spare % 4 == 3, tf.int64)
    edges = tf.cast(tf.stack([start, start + image_size]), tf.float64)
    size, resized = tf.cast(size, tf.float64), tf.cast(resized, tf.float64)
    # This order of operations is exact if nothing is resized. Otherwise, rounding could put the last edge outside.
    return tf.minimum(edges * (size / resized), size)


def around(box: Any, image_size: int, size: Any) -> Any:
    """Return the whole pixels that the filter reads, int32[4] (top, left, height, width), in an image of `size`.

    If the box is not resized, these are the pixels of the box.
    """
    scale = (box[1] - box[0]) / image_size
    reach = tf.where(scale == 1, tf.zeros_like(scale), tf.maximum(scale, 1))
    start = tf.maximum(tf.cast(tf.floor(box[0] - reach), tf.int32), 0)
    stop = tf.minimum(tf.cast(tf.math.ceil(box[1] + reach), tf.int32), size)
    return tf.concat([start, stop - start], 0)


def resampled(image: Any, box: Any, image_size: int) -> Any:
    """Resample the box of an image, [H, W, C], to [image_size, image_size, C] of the same dtype, rounded."""
    scale = image_size / (box[1] - box[0])
    pixels = tf.raw_ops.ScaleAndTranslate(
        images=image[None],
        size=[image_size, image_size],
        scale=tf.cast(scale, tf.float32),
        translation=tf.cast(-box[0] * scale, tf.float32),
        kernel_type="triangle",
        antialias=True,
    )
    # Every value is a mean of pixels, so its rounded value is in the range of the dtype.
    return tf.cast(tf.round(pixels[0]), image.dtype)
