"""From an encoded image to uint8 pixels of one size: the TensorFlow functions that a stream maps over its examples.

Flipping and normalizing are not done here: they happen on the device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from jaxddp.data.images.center import around, center_box, resampled
from jaxddp.data.images.header import AGAIN, JPEG_END, JPEG_START, MAX_PIXELS, parse_header
from jaxddp.data.images.verify import verify
from jaxddp.data.images.windows import Area, random_area_window, resize
from jaxddp.data.tensorflow_cpu import tf
from jaxddp.errors import InputError

Window = Callable[[Any], Any]
"""From an image's size, int32[2] (height, width), to the part to keep, int32[4] (top, left, height, width)."""

# Decoders can give a JPEG at a half, a quarter or an eighth of its size for less work.
_SCALES = (8, 4, 2)
# The exact cosine transform gives what Pillow gives; the coarse one, TensorFlow's default, is off by a few levels and
# saves a tenth of decoding.
_EXACT, _COARSE = "INTEGER_ACCURATE", "INTEGER_FAST"


def train_image(data: Any, key: Any, area: Area | None, image_size: int) -> Any:
    """One training example, uint8[image_size, image_size, 3], of an encoded image and a row of `example_keys`.

    Args:
        area: of the random crop; the image stays whole where absent.
    """
    if area is None:
        return fitted_window(data, lambda size: tf.stack([0, 0, size[0], size[1]]), image_size)
    return fitted_window(data, lambda size: random_area_window(size, key, area), image_size, exact=False)


def eval_image(data: Any, image_size: int, resize: int) -> Any:
    """One evaluation example, uint8[image_size, image_size, 3]: the short side resized to `resize`, then the center.

    The pixels are those of torchvision's Resize and CenterCrop, within a level of 255; only what the center needs is
    decoded. Where the short side is `resize` already, they are the image's own.
    """
    size = _size(data)
    box = center_box(size, image_size, resize)
    window = around(box, image_size, size)
    image = decode_window(data, lambda _: window)
    place = box - tf.cast(window[:2], tf.float64)
    pixels = tf.cond(tf.reduce_min(size) == resize, lambda: image, lambda: resampled(image, place, image_size))
    return tf.ensure_shape(pixels, [image_size, image_size, 3])


def verified(data: Any, wanted: Any) -> Any:
    """The same encoded image; where `wanted`, a bool scalar, an error of TensorFlow's if `verify` refuses it."""
    return tf.cond(wanted, lambda: tf.ensure_shape(tf.numpy_function(_verified, [data], tf.string), []), lambda: data)


def fitted_window(data: Any, window: Window, image_size: int, *, exact: bool = True) -> Any:
    """The part of the image that `window` names, resized: uint8[image_size, image_size, 3]; see `decode_window`."""
    return resize(decode_window(data, window, image_size, exact=exact), image_size)


def decodes(data: bytes) -> None:
    """Raises `InputError` for an image that TensorFlow does not decode."""
    try:
        tf.io.decode_image(data, channels=3, expand_animations=False)
    except tf.errors.OpError as error:
        raise InputError(f"does not decode ({error.message}); {AGAIN}") from None


def decode_window(data: Any, window: Window, least: int | None = None, *, exact: bool = True) -> Any:
    """The part of the image that `window` names, uint8[height, width, 3], of a JPEG or PNG file.

    Gray is repeated and CMYK converted to RGB; alpha is dropped. A file that `parse_header` refuses is an error of
    TensorFlow's, even where its damage lies below the window.

    Args:
        least: a JPEG may be decoded at a half, a quarter or an eighth of its size, if no side of the window becomes
            shorter than this; at its own size where absent.
        exact: whether a JPEG's pixels are those of the whole image decoded. Otherwise they differ by a few levels,
            which does not matter to random crops, and are decoded faster.
    """
    image = tf.cond(
        _is_jpeg(data),
        lambda: _decode_jpeg(data, _checked_window(data, window), least, exact),
        lambda: _decode_png(data, window),
    )
    return tf.ensure_shape(image, [None, None, 3])


def _is_jpeg(data: Any) -> Any:
    """Bool scalar; an error for what is neither JPEG nor PNG, or not whole."""
    # Nearly every file passes this look at both ends; only the others are checked in Python, which is slow here.
    plain_jpeg = (tf.strings.substr(data, 0, 3) == JPEG_START) & (tf.strings.substr(data, -2, 2) == JPEG_END)
    return tf.cond(plain_jpeg, lambda: True, lambda: tf.numpy_function(_parses_as_jpeg, [data], tf.bool))


def _size(data: Any) -> Any:
    """Height and width in pixels, int32[2], as the header has them."""

    def of_png() -> Any:
        # IHDR is the first chunk of every PNG file, and begins with width and height.
        return tf.io.decode_raw(tf.strings.substr(data, 16, 8), tf.int32, little_endian=False)[::-1]

    size = tf.cond(_is_jpeg(data), lambda: tf.image.extract_jpeg_shape(data)[:2], of_png)
    return tf.ensure_shape(size, [2])


def _parses_as_jpeg(data: bytes | np.ndarray) -> np.bool_:
    # Bytes in a graph, an array that holds them outside of one.
    return np.bool_(parse_header(np.asarray(data, object).item()).kind == "jpeg")


def _verified(data: bytes) -> bytes:
    verify(data)
    return data


def _checked_window(data: Any, window: Window) -> Any:
    size = tf.image.extract_jpeg_shape(data)[:2]
    pixels = tf.reduce_prod(tf.cast(size, tf.int64))
    check = tf.debugging.Assert(pixels <= MAX_PIXELS, ["more pixels than the limit"])
    with tf.control_dependencies([check]):
        return tf.identity(window(size))


def _decode_jpeg(data: Any, part: Any, least: int | None, exact: bool) -> Any:
    """The part at its own size, or at the smallest fraction of it that leaves its sides long enough."""
    whole = partial(_decode_exactly if exact else _decode, data, part)
    if least is None:
        return whole()
    short = tf.reduce_min(part[2:])

    def scaled(scale: int) -> Any:
        # What the part covers of the smaller image, whose pixels are `scale` of its own: whole pixels, outwards.
        start, stop = part[:2] // scale, -(-(part[:2] + part[2:]) // scale)
        return _decode(data, tf.concat([start, stop - start], 0), scale, _EXACT if exact else _COARSE)

    cases = [(short >= scale * least, partial(scaled, scale)) for scale in _SCALES]
    return tf.case(cases, default=whole)


def _decode_exactly(data: Any, part: Any) -> Any:
    """The same pixels as decoding everything and slicing, in less time."""
    _, left, _, width = tf.unstack(part)
    # Color is stored at half the resolution and smoothed across columns, for which a window's outermost columns may
    # lack a neighbor. With one column more on each side the window itself is exact.
    first = tf.maximum(left - 1, 0)
    last = tf.minimum(left + width + 1, tf.image.extract_jpeg_shape(data)[1])
    image = _decode(data, tf.stack([part[0], first, part[2], last - first]), transform=_EXACT)
    return image[:, left - first : left - first + width]


def _decode(data: Any, part: Any, scale: int = 1, transform: str = _COARSE) -> Any:
    return tf.image.decode_and_crop_jpeg(data, part, channels=3, ratio=scale, dct_method=transform)


def _decode_png(data: Any, window: Window) -> Any:
    image = tf.image.decode_png(data, channels=3)
    top, left, height, width = tf.unstack(window(tf.shape(image)[:2]))
    return image[top : top + height, left : left + width]
