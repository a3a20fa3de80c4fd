"""From RGB to the channels and bits that a config asks for, in TensorFlow's graph."""

from typing import Any

from jaxddp.data.images.pixel_format import PixelFormat
from jaxddp.data.tensorflow_cpu import tf

# Of red, green and blue in gray, in 65536ths: Pillow's, of ITU-R BT.601, in integers.
_LUMA = (19595, 38470, 7471)


def decoded_channels(pixels: PixelFormat) -> int:
    """Of what a decoder is asked for: RGBA where alpha is wanted, else RGB."""
    # TensorFlow's own gray of a PNG is a level off in places, so gray is made of RGB.
    return 4 if pixels.channels == 4 else 3


def gray(image: Any, pixels: PixelFormat) -> Any:
    """RGB as its luma, where gray is wanted; of gray that was repeated, the same values."""
    if pixels.channels != 1:
        return image
    luma = tf.reduce_sum(tf.cast(image, tf.int64) * _LUMA, axis=-1, keepdims=True)
    return tf.cast((luma + (1 << 15)) // (1 << 16), image.dtype)


def converted(image: Any, pixels: PixelFormat) -> Any:
    """RGB of 8 bits in the wanted format."""
    if pixels.channels == 4:
        image = tf.pad(image, [[0, 0], [0, 0], [0, 1]], constant_values=255)
    return gray(image if pixels.bits == 8 else tf.cast(image, tf.uint16) * 257, pixels)
