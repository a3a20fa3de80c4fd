"""Resizing within TensorFlow's graph: bilinear with antialias, on uint8 and quickly."""

from typing import Any

from jaxddp.data.tensorflow_cpu import tf


def resize_bilinear(image: Any, image_size: int, window: Any = None) -> Any:
    """Part of an image, resized: uint8[image_size, image_size, 3].

    Bilinear with antialias, rounded. Without a window equal to `tf.image.resize(image, …, antialias=True)` and quicker:
    its kernel is fast down the columns and slow along the rows, so both passes go down the columns of an image that is
    turned in between. Called alone on one core, 250x333 to 224, it takes 0.40 ms for 1.16.

    Args:
        image: uint8[H, W, 3].
        window: float32[4], top, left, height and width of the part, in pixels and parts of them; all where absent.
    """
    height, width = tf.unstack(tf.shape(image)[:2])
    if window is None:
        window = tf.cast(tf.stack([0, 0, height, width]), tf.float32)
    top, left, part_height, part_width = tf.unstack(window)
    down = _resize_columns(tf.reshape(image, [height, width * 3]), top, part_height, image_size)
    turned = tf.transpose(tf.reshape(down, [image_size, width, 3]), [1, 0, 2])
    across = _resize_columns(tf.reshape(turned, [width, image_size * 3]), left, part_width, image_size)
    # The weights are positive and add up to 1, so rounding never leaves 0..255.
    pixels = tf.cast(tf.round(across), tf.uint8)
    return tf.transpose(tf.reshape(pixels, [image_size, image_size, 3]), [1, 0, 2])


def _resize_columns(table: Any, start: Any, extent: Any, length: int) -> Any:
    """The stretch [start, start + extent) of n rows as `length` rows: from [n, m] to float32[length, m]."""
    scale = length / extent
    return tf.raw_ops.ScaleAndTranslate(
        images=table[None, :, None, :],
        size=[length, 1],
        scale=tf.stack([scale, 1.0]),
        translation=tf.stack([-start * scale, 0.0]),
        kernel_type="triangle",
        antialias=True,
    )[0, :, 0, :]
