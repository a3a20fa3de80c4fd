"""TensorFlow functions that crop an image (to a window) and resize the crop to a square.

In training, windows are random. They are drawn by stateless ops from a key of (seed, epoch, row), so they are the same
in every thread and on every host. An image that shrinks by a ratio of more than 1.6 is resized by area: an output pixel
is the mean of the input pixels that it covers, as in OpenCV's INTER_AREA. Other images are resized bilinearly. Up to a
ratio of 1.6, bilinear sampling uses every pixel, and its result is as near to that of a Lanczos filter as the result of
Pillow's triangle filter (TensorFlow's `antialias=True`, which took longer than decoding). At larger ratios, bilinear
sampling would alias. See benchmarks/RESULTS.md for measurements.

In evaluation, the short side is resized and the center is cropped as by torchvision's Resize and CenterCrop, because
published weights expect these pixels. torchvision uses an antialiased triangle filter at subpixel positions. Here, one
op resizes and crops, so only the pixels that the center crop depends on are read.

Bicubic resizing is that of Pillow in training as well: antialiased, and rounded to whole levels and clipped after each
direction. Some weights are negative, so a value may be outside the range of pixels.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.stream.tensorflow_cpu import tf

CROP_TRIES = 10
ASPECT = (3 / 4, 4 / 3)
"""The bounds of width / height of a crop of random area."""
_BILINEAR_TO = 1.6
"""The largest ratio of input length to output length at which an axis is resized bilinearly."""
Interpolation = Literal["bilinear", "bicubic"]
_REACH = {"bilinear": 1, "bicubic": 2}
"""The reach of each interpolation's kernel, in pixels."""

Area = tuple[float, float]
"""The bounds of (area of the crop) / (area of the image), within 0..1."""


def crop_area(data: DataConfig) -> Area | None:
    """Return the bounds of the area of training crops from a config; None if images are not cropped."""
    return None if data.crop == "whole" else data.area


def example_keys(seed: int, epoch: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return a random key for each example of a batch, int64[B, 2]; epochs and rows are int32[B]."""
    return np.stack([np.full(len(row), seed, np.int64), epoch.astype(np.int64) << 32 | row.astype(np.int64)], axis=1)


def random_area_window(size: Any, key: Any, area: Area) -> Any:
    """Return a random window of an image, int32[4] (top, left, height, width), as in the training of Inception.

    The area is uniform in `area` times the area of the image, the aspect is log-uniform in `ASPECT`, and the position
    is uniform among the positions inside the image. The first of `CROP_TRIES` draws that fits is used. If no draw fits,
    the largest central window with an aspect within the bounds is used. (Szegedy et al., "Going deeper with
    convolutions", CVPR 2015, section 6; the tries and the fallback are those of torchvision's RandomResizedCrop.)
    """
    bounds = tf.constant([area, tuple(map(math.log, ASPECT)), (0, 1), (0, 1)], tf.float32)
    # The algorithm is explicit, because the default may differ between devices and releases.
    draws = tf.random.stateless_uniform([4, CROP_TRIES], key, alg="philox")
    part, log_aspect, top, left = tf.unstack(bounds[:, :1] + draws * (bounds[:, 1:] - bounds[:, :1]))
    full_height, full_width = tf.unstack(tf.cast(size, tf.float32))
    side, stretch = tf.sqrt(part * full_height * full_width), tf.exp(log_aspect / 2)
    height, width = tf.round(side / stretch), tf.round(side * stretch)
    fits = (height >= 1) & (height <= full_height) & (width >= 1) & (width <= full_width)

    # In float32, the product can be rounded up to one more than the last position.
    top = tf.minimum(tf.floor(top * (full_height - height + 1)), full_height - height)
    left = tf.minimum(tf.floor(left * (full_width - width + 1)), full_width - width)
    # The weights decrease, because argmax may return any index of several equal values.
    first = tf.argmax(tf.cast(fits, tf.int32) * tf.range(CROP_TRIES, 0, -1))
    drawn = tf.cast(tf.stack([top, left, height, width])[:, first], tf.int32)
    return tf.where(fits[first], drawn, _fallback_window(full_height, full_width))


def _fallback_window(full_height: Any, full_width: Any) -> Any:
    height = tf.minimum(full_height, tf.maximum(tf.round(full_width / ASPECT[0]), 1))
    width = tf.minimum(full_width, tf.maximum(tf.round(full_height * ASPECT[1]), 1))
    return tf.cast(tf.stack([(full_height - height) // 2, (full_width - width) // 2, height, width]), tf.int32)


def resize(image: Any, image_size: int, interpolation: Interpolation = "bilinear") -> Any:
    """Resize [H, W, C] to [image_size, image_size, C] of the same dtype, rounded. An image of that size is unchanged.

    If the ratio of one axis is above 1.6, bilinear interpolation resizes both axes by area, except for an axis that is
    enlarged.
    """
    shape, square = tf.shape(image)[:2], [image_size, image_size]
    if interpolation == "bicubic":
        whole = tf.cast(tf.stack([tf.zeros_like(shape), shape]), tf.float64)
        pixels = resample_bicubically(image, whole, image_size, shape, square)
        return tf.ensure_shape(pixels, [*square, image.shape[-1]])
    resample_bilinearly = partial(tf.raw_ops.ResizeBilinear, size=square, half_pixel_centers=True)
    pixels = tf.cond(
        tf.reduce_any(shape > int(_BILINEAR_TO * image_size)),
        lambda: resample_bilinearly(
            images=tf.raw_ops.ResizeArea(images=image[None], size=tf.minimum(shape, image_size))
        ),
        lambda: resample_bilinearly(images=image[None]),
    )
    # Every value is a mean of pixels, so its rounded value is in the range of the dtype.
    return tf.ensure_shape(tf.cast(tf.round(pixels[0]), image.dtype), [*square, image.shape[-1]])


def resized_size(size: Any, resize: int, *, squash: bool = False) -> Any:
    """Return height and width of the whole image in evaluation before the center is cropped, int64[2].

    As by torchvision 0.29's Resize, the short side is resized to `resize` pixels, and the length of the long side is
    rounded down.

    Args:
        size: int32[2], height and width of the image.
        squash: whether both sides are resized to `resize` pixels instead.
    """
    size = tf.cast(size, tf.int64)
    return tf.fill([2], tf.constant(resize, tf.int64)) if squash else resize * size // tf.reduce_min(size)


def center_box(size: Any, resized: Any, image_size: int) -> Any:
    """Return the box of the center crop, float64[2, 2], in pixels of the original image.

    The first axis is (start, stop), the second (rows, columns). The crop has the central `image_size` pixels of both
    sides of the resized image. As by torchvision 0.29's CenterCrop, its start is rounded to an integer, halves to even.

    Args:
        size: int32[2], height and width of the image.
        resized: int64[2], see `resized_size`.
    """
    spare = resized - image_size
    start = spare // 2 + tf.cast(spare % 4 == 3, tf.int64)
    edges = tf.cast(tf.stack([start, start + image_size]), tf.float64)
    size, resized = tf.cast(size, tf.float64), tf.cast(resized, tf.float64)
    # Without a resize, this order of operations is exact. With a resize, rounding could move the last edge outside.
    return tf.minimum(edges * (size / resized), size)


def filter_window(box: Any, image_size: int, size: Any, interpolation: Interpolation = "bilinear") -> Any:
    """Return the window that the filter reads, int32[4] (top, left, height, width), to resize a box of an image.

    If the box is not resized, the window is the box.
    """
    scale = (box[1] - box[0]) / image_size
    reach = tf.where(scale == 1, tf.zeros_like(scale), _REACH[interpolation] * tf.maximum(scale, 1))
    start = tf.maximum(tf.cast(tf.floor(box[0] - reach), tf.int32), 0)
    stop = tf.minimum(tf.cast(tf.math.ceil(box[1] + reach), tf.int32), size)
    return tf.concat([start, stop - start], 0)


def resample(image: Any, box: Any, image_size: int) -> Any:
    """Resize the box of an image, [H, W, C], to [image_size, image_size, C] of the same dtype, bilinearly, rounded."""
    # Every value is a mean of pixels, so its rounded value is in the range of the dtype.
    return _resample_rows_first(image, box, image_size, lambda rows: rows, tf.round)


def resample_bicubically(image: Any, box: Any, image_size: int, size: Any, resized: Any) -> Any:
    """Resize the box of an image, [H, W, C], to [image_size, image_size, C] of the same dtype, as Pillow does.

    Pillow resizes along the columns first if the height shrinks, and by more than twice as many pixels as the width
    (measured with Pillow 13.0). The order changes pixels at edges, because values are clipped in between.

    Args:
        size, resized: integers [2], height and width of the whole image before and after Pillow's resizing.
    """
    highest = image.dtype.max

    def levels(values: Any) -> Any:
        # Pillow rounds exact halves up. Rounding errors of float32 are smaller than the added 2**-15.
        return tf.clip_by_value(tf.floor(values + (0.5 + 2**-15)), 0, highest)

    def turned() -> Any:
        columns_first = _resample_rows_first(
            tf.transpose(image, [1, 0, 2]), box[:, ::-1], image_size, levels, levels, "keyscubic"
        )
        return tf.transpose(columns_first, [1, 0, 2])

    height_loss, width_loss = tf.unstack(tf.cast(size, tf.int64) - tf.cast(resized, tf.int64))
    return tf.cond(
        (height_loss > 0) & (height_loss > 2 * width_loss),
        lambda: _resample_rows_first(image, box, image_size, levels, levels, "keyscubic"),
        turned,
    )


def _resample_rows_first(
    image: Any,
    box: Any,
    image_size: int,
    between: Callable[[Any], Any],
    finish: Callable[[Any], Any],
    kernel: str = "triangle",
) -> Any:
    """Resize the first axis of an image, [H, W, C], and then the second.

    Args:
        between, finish: functions of the values after the first and the second direction, float32.
        kernel: TensorFlow's name of the kernel.
    """
    ratio = image_size / (box[1] - box[0])
    scale, translation = tf.cast(ratio, tf.float32), tf.cast(-box[0] * ratio, tf.float32)
    height, width, channels = tf.unstack(tf.shape(image))

    def resample_rows(values: Any, axis: int) -> Any:
        """Resize the first axis of [length, N] to image_size."""
        # TensorFlow's op resizes columns of pixels with many channels in a quarter of the time of rows of pixels.
        return tf.raw_ops.ScaleAndTranslate(
            images=values[None, :, None],
            size=[image_size, 1],
            scale=tf.stack([scale[axis], 1.0]),
            translation=tf.stack([translation[axis], 0.0]),
            kernel_type=kernel,
            antialias=True,
        )[0, :, 0]

    rows = between(resample_rows(tf.reshape(image, [height, width * channels]), 0))
    # A matrix is transposed in half the time of pixels. The axes are then columns, channels and rows.
    turned = tf.reshape(tf.transpose(rows), [width, channels * image_size])
    pixels = tf.cast(finish(resample_rows(turned, 1)), image.dtype)
    turned_back = tf.transpose(tf.reshape(pixels, [image_size * channels, image_size]))
    return tf.reshape(turned_back, [image_size, image_size, channels])
