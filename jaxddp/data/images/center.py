"""Evaluation's pixels: the short side resized, then the center, as torchvision's Resize and CenterCrop give them.

Published weights were made for those pixels: a triangle filter as wide as the scale (antialiased), at subpixel
position. Pillow's `resize`, which torchvision calls too, does both in one step, from the pixels that the center needs.
"""

from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from jaxddp.data.tensorflow_cpu import tf


def center_box(size: Any, image_size: int, resize: int) -> Any:
    """What the center covers of an image of `size`, int32[2] (height, width): float64[2, 2], in its pixels.

    The first axis is (start, stop), the second (rows, columns). The short side becomes `resize` pixels, the long one a
    whole number, rounded down; of both the central `image_size` are taken, from a whole number on, a half rounded to
    even. (torchvision 0.29's Resize and CenterCrop.)
    """
    size = tf.cast(size, tf.int64)
    resized = resize * size // tf.reduce_min(size)
    spare = resized - image_size
    start = spare // 2 + tf.cast(spare % 4 == 3, tf.int64)
    edges = tf.cast(tf.stack([start, start + image_size]), tf.float64)
    size, resized = tf.cast(size, tf.float64), tf.cast(resized, tf.float64)
    # Beyond 2^53 the last edge could round past the image.
    return tf.minimum(edges * size / resized, size)


def around(box: Any, size: Any, image_size: int) -> Any:
    """The whole pixels of the image that the filter meets, int32[4] (top, left, height, width)."""
    reach = tf.maximum((box[1] - box[0]) / image_size, 1)
    start = tf.maximum(tf.cast(tf.floor(box[0] - reach), tf.int32), 0)
    stop = tf.minimum(tf.cast(tf.math.ceil(box[1] + reach), tf.int32), size)
    return tf.concat([start, stop - start], 0)


def resampled(image: Any, box: Any, image_size: int) -> Any:
    """What the box covers of an image, uint8[H, W, 3], as uint8[image_size, image_size, 3]."""
    # Pillow filters outside of Python's lock. TensorFlow's own filter takes longer and is no nearer (BUILD_NOTES.md).
    pixels = tf.numpy_function(partial(_resampled, image_size), [image, box], tf.uint8)
    return tf.ensure_shape(pixels, [image_size, image_size, 3])


def _resampled(image_size: int, image: np.ndarray, box: np.ndarray) -> np.ndarray:
    (top, left), (bottom, right) = box.tolist()
    size, edges = (image_size, image_size), (left, top, right, bottom)
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR, box=edges))
