"""Resizing within TensorFlow's graph, on uint8 and quickly: each axis is shrunk by area and stretched bilinearly.

An output pixel of a shrunk axis is the mean of the stretch that it covers, which leaves nothing to alias; so OpenCV's
INTER_AREA does it, the filter of the quickest published ImageNet recipes. The triangle filter of Pillow (TensorFlow's
`antialias=True`) took four times as long here, longer than decoding: BUILD_NOTES.md has the figures.
"""

from typing import Any

from jaxddp.data.tensorflow_cpu import tf


def resize(image: Any, image_size: int) -> Any:
    """From uint8[H, W, 3] to uint8[image_size, image_size, 3], rounded; an image of that size stays as it is."""
    size = tf.shape(image)[:2]
    shrinks, stretches = tf.reduce_any(size > image_size), tf.reduce_any(size < image_size)
    image = tf.cond(shrinks, lambda: _round(_shrink(image, tf.minimum(size, image_size))), lambda: image)
    image = tf.cond(stretches, lambda: _round(_stretch(image, image_size)), lambda: image)
    return tf.ensure_shape(image, [image_size, image_size, 3])


def _shrink(image: Any, size: Any) -> Any:
    return tf.raw_ops.ResizeArea(images=image[None], size=size)[0]


def _stretch(image: Any, image_size: int) -> Any:
    return tf.raw_ops.ResizeBilinear(images=image[None], size=[image_size, image_size], half_pixel_centers=True)[0]


def _round(pixels: Any) -> Any:
    # Means of pixels, so rounding never leaves 0..255.
    return tf.cast(tf.round(pixels), tf.uint8)
