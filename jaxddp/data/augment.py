"""From an image file to uint8 pixels of one size: the TensorFlow functions that a stream maps over its examples.

What is random here is drawn with stateless ops from a key of (seed, epoch, row), so it depends neither on the thread
nor on the host that happens to draw it. Flipping and normalizing are not done here: they happen on the device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxddp.data.imagefile import JPEG_END, JPEG_START, MAX_PIXELS, parse_header
from jaxddp.data.tensorflow_cpu import tf
from jaxddp.errors import InputError

CROP_TRIES = 10

Window = Callable[[Any], Any]
"""From an image's size, int32[2] (height, width), to the part to keep, int32[4] (top, left, height, width)."""


@dataclass(frozen=True)
class Crop:
    """Which part of a training image is kept before it is resized.

    Args:
        kind: `random_area` takes a part of random area and aspect, anew in every epoch; `whole` takes the image as it
            is, for small images that are cropped on the device.
        area: the least and the most part of the image's area, within 0..1.
        aspect: the least and the most width / height of the part.

    Raises:
        InputError: an unknown kind, or bounds that are out of order.
    """

    kind: Literal["random_area", "whole"] = "random_area"
    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)

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
    """The stateless key of each example's appearance, int64[B, 2]: no two (seed, epoch, row) share one.

    Args:
        seed: 0..2**63-1.
        epoch, row: int32[B].
    """
    return np.stack([np.full(len(row), seed, np.int64), epoch.astype(np.int64) << 32 | row.astype(np.int64)], axis=1)


def train_image(path: Any, key: Any, crop: Crop, image_size: int) -> Any:
    """One training example: read, decode the cropped part alone, resize.

    Args:
        path: string scalar.
        key: int64[2], a row of `example_keys`.

    Returns:
        uint8[image_size, image_size, 3].
    """
    if crop.kind == "whole":
        return _fit(decode_window(path, _whole_window), image_size)
    return resize_bilinear(decode_window(path, lambda size: random_area_window(size, key, crop)), image_size)


def eval_image(path: Any, image_size: int, resize: int) -> Any:
    """One evaluation example: the short side resized to `resize`, then the central square of `image_size`.

    Both steps in one: the central square whose side is `image_size / resize` of the short side is decoded alone and
    resized to `image_size`, which samples the same pixels at the same scale, up to the rounding of the square to whole
    pixels.

    Args:
        path: string scalar.

    Returns:
        uint8[image_size, image_size, 3].
    """
    return _fit(decode_window(path, lambda size: center_window(size, image_size, resize)), image_size)


def random_area_window(size: Any, key: Any, crop: Crop) -> Any:
    """A random part of the image, int32[4] (top, left, height, width): the crop of Inception's training.

    The area is uniform in `crop.area` times the image's, the aspect log-uniform in `crop.aspect`, the place uniform
    among those where the part lies within the image. The first of `CROP_TRIES` draws that fits is taken; if none does,
    the largest central part whose aspect lies within bounds. (Szegedy et al., "Going deeper with convolutions", CVPR
    2015, section 6; the tries and what follows them are those of torchvision's RandomResizedCrop.)

    Args:
        size: int32[2], height and width.
        key: int64[2], the stateless seed.
    """
    bounds = tf.constant([crop.area, tuple(map(math.log, crop.aspect)), (0, 1), (0, 1)], tf.float32)
    # A named algorithm: the default may differ between devices and releases.
    draws = tf.random.stateless_uniform([4, CROP_TRIES], key, alg="philox")
    area, log_aspect, top, left = tf.unstack(bounds[:, :1] + draws * (bounds[:, 1:] - bounds[:, :1]))
    full_height, full_width = tf.unstack(tf.cast(size, tf.float32))
    side, stretch = tf.sqrt(area * full_height * full_width), tf.exp(log_aspect / 2)
    height, width = tf.round(side / stretch), tf.round(side * stretch)
    fits = (height >= 1) & (height <= full_height) & (width >= 1) & (width <= full_width)

    # In float32 the product can round up to the next whole place, one past the last.
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


def _fallback_window(full_height: Any, full_width: Any, crop: Crop) -> Any:
    height = tf.minimum(full_height, tf.maximum(tf.round(full_width / crop.aspect[0]), 1))
    width = tf.minimum(full_width, tf.maximum(tf.round(full_height * crop.aspect[1]), 1))
    return tf.cast(tf.stack([(full_height - height) // 2, (full_width - width) // 2, height, width]), tf.int32)


def _whole_window(size: Any) -> Any:
    return tf.stack([0, 0, size[0], size[1]])


def decode_window(path: Any, window: Window) -> Any:
    """The part of the image that `window` names, uint8[height, width, 3], of a JPEG or PNG file.

    Gray is repeated and CMYK converted to RGB; alpha is dropped. A file that `parse_header` refuses is an error of
    TensorFlow's, even where its damage lies below the window.
    """
    data = tf.io.read_file(path)
    # Nearly every file passes this look at both ends; Python, which is slow here, judges only the others.
    plain_jpeg = (tf.strings.substr(data, 0, 3) == JPEG_START) & (tf.strings.substr(data, -2, 2) == JPEG_END)
    jpeg = tf.cond(plain_jpeg, lambda: True, lambda: tf.numpy_function(_is_jpeg, [data], tf.bool))
    image = tf.cond(jpeg, lambda: _decode_jpeg(data, window), lambda: _decode_png(data, window))
    return tf.ensure_shape(image, [None, None, 3])


def _is_jpeg(data: bytes | np.ndarray) -> np.bool_:
    # Bytes in a graph, an array that holds them outside of one.
    return np.bool_(parse_header(np.asarray(data, object).item()).kind == "jpeg")


def _decode_jpeg(data: Any, window: Window) -> Any:
    """Decodes the window alone: the same pixels as decoding everything and slicing, in less time."""
    size = tf.image.extract_jpeg_shape(data)[:2]
    pixels = tf.reduce_prod(tf.cast(size, tf.int64))
    check = tf.debugging.Assert(pixels <= MAX_PIXELS, ["more pixels than the limit"])
    with tf.control_dependencies([check]):
        top, left, height, width = tf.unstack(window(size))
    # Color is stored at half the resolution and smoothed across columns, which goes wrong in the outermost column of a
    # window that ends on a block's border. One column more on each side keeps the window exact.
    start, stop = tf.maximum(left - 1, 0), tf.minimum(left + width + 1, size[1])
    part = tf.stack([top, start, height, stop - start])
    # TensorFlow's default is the fast, coarse cosine transform; the exact one costs no more and gives what PIL gives.
    image = tf.image.decode_and_crop_jpeg(data, part, channels=3, dct_method="INTEGER_ACCURATE")
    return image[:, left - start : left - start + width]


def _decode_png(data: Any, window: Window) -> Any:
    image = tf.image.decode_png(data, channels=3)
    top, left, height, width = tf.unstack(window(tf.shape(image)[:2]))
    return image[top : top + height, left : left + width]


def _fit(image: Any, image_size: int) -> Any:
    """`resize_bilinear`, left out where the size is right already."""
    right = tf.reduce_all(tf.equal(tf.shape(image)[:2], image_size))
    image = tf.cond(right, lambda: image, lambda: resize_bilinear(image, image_size))
    return tf.ensure_shape(image, [image_size, image_size, 3])


def resize_bilinear(image: Any, image_size: int) -> Any:
    """Bilinear with antialias, rounded: uint8[image_size, image_size, 3].

    Equal to `tf.image.resize(image, …, antialias=True)` and quicker: its kernel is fast down the columns and slow along
    the rows, so both passes go down the columns of an image that is turned in between. Called alone on one core,
    250x333 to 224, it takes 0.40 ms for 1.16; in a stream with the same crops, about a fifth less CPU an image.
    """
    height, width = tf.unstack(tf.shape(image)[:2])
    down = _resize_columns(tf.reshape(image, [height, width * 3]), image_size)
    turned = tf.transpose(tf.reshape(down, [image_size, width, 3]), [1, 0, 2])
    across = _resize_columns(tf.reshape(turned, [width, image_size * 3]), image_size)
    # The weights are positive and add up to 1, so rounding never leaves 0..255.
    pixels = tf.cast(tf.round(across), tf.uint8)
    return tf.transpose(tf.reshape(pixels, [image_size, image_size, 3]), [1, 0, 2])


def _resize_columns(table: Any, length: int) -> Any:
    """From [n, m] to float32[length, m]."""
    scale = length / tf.cast(tf.shape(table)[0], tf.float32)
    return tf.raw_ops.ScaleAndTranslate(
        images=table[None, :, None, :],
        size=[length, 1],
        scale=tf.stack([scale, 1.0]),
        translation=[0.0, 0.0],
        kernel_type="triangle",
        antialias=True,
    )[0, :, 0, :]
