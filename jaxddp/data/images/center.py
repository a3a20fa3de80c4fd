"""Evaluation's pixels: the short side resized, then the center, as torchvision's Resize and CenterCrop give them.

Published weights were made for those pixels: a triangle filter as wide as the scale (antialiased), at subpixel
position. Both are one step here, from the pixels that the center needs.
"""

from typing import Any

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
    # In this order nothing is rounded where nothing is resized; elsewhere the last edge could round past the image.
    return tf.minimum(edges * (size / resized), size)


def around(box: Any, image_size: int, size: Any) -> Any:
    """The whole pixels that the filter meets, int32[4] (top, left, height, width), within an image of `size`.

    These are the box's own where it is as large as what is made of it.
    """
    scale = (box[1] - box[0]) / image_size
    reach = tf.where(scale == 1, tf.zeros_like(scale), tf.maximum(scale, 1))
    start = tf.maximum(tf.cast(tf.floor(box[0] - reach), tf.int32), 0)
    stop = tf.minimum(tf.cast(tf.math.ceil(box[1] + reach), tf.int32), size)
    return tf.concat([start, stop - start], 0)


def resampled(image: Any, box: Any, image_size: int) -> Any:
    """What the box covers of an image, [H, W, C], as [image_size, image_size, C] of the same dtype, rounded."""
    scale = image_size / (box[1] - box[0])
    pixels = tf.raw_ops.ScaleAndTranslate(
        images=image[None],
        size=[image_size, image_size],
        scale=tf.cast(scale, tf.float32),
        translation=tf.cast(-box[0] * scale, tf.float32),
        kernel_type="triangle",
        antialias=True,
    )
    # Means of pixels, so rounding never leaves their range.
    return tf.cast(tf.round(pixels[0]), image.dtype)
