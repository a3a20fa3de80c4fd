"""Resizing for training, in TensorFlow's graph, on uint8: by area where an image shrinks much, otherwise bilinearly.

Up to a ratio of 1.6, bilinear sampling meets every pixel, and comes as near to a Lanczos filter as the triangle filter
of Pillow does (TensorFlow's `antialias=True`, which took longer than decoding). Beyond it would alias: there an output
pixel is the mean of the stretch that it covers, as in OpenCV's INTER_AREA. BUILD_NOTES.md has the measurements.
"""

from typing import Any

from jaxddp.data.tensorflow_cpu import tf

_BILINEAR_TO = 1.6
"""The largest ratio of lengths, input to output, up to which an axis is shrunk bilinearly."""


def resize(image: Any, image_size: int) -> Any:
    """From uint8[H, W, 3] to uint8[image_size, image_size, 3], rounded; an image of that size stays as it is.

    Where one axis has to be shrunk by area, so is the other, unless it is stretched.
    """
    much = tf.reduce_any(tf.shape(image)[:2] > int(_BILINEAR_TO * image_size))
    pixels = tf.cond(
        much,
        lambda: _sample(_shrink(image, image_size), image_size),
        lambda: _sample(image, image_size),
    )
    # Means of pixels, so rounding never leaves 0..255.
    return tf.ensure_shape(tf.cast(tf.round(pixels), tf.uint8), [image_size, image_size, 3])


def _shrink(image: Any, image_size: int) -> Any:
    return tf.raw_ops.ResizeArea(images=image[None], size=tf.minimum(tf.shape(image)[:2], image_size))[0]


def _sample(image: Any, image_size: int) -> Any:
    return tf.raw_ops.ResizeBilinear(images=image[None], size=[image_size, image_size], half_pixel_centers=True)[0]
