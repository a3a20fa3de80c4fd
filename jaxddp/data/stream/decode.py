"""From an encoded image to pixels of one size: the TensorFlow functions that a stream maps over its examples.

Flipping and normalizing are not done here: they happen on the device.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.data.images.header import JPEG_END, JPEG_START, parse_header
from jaxddp.data.images.image_types import AGAIN, MAX_PIXELS, PillowKind, PixelFormat
from jaxddp.data.images.pillow import decode_pillow
from jaxddp.data.stream.tensorflow_cpu import tf
from jaxddp.data.stream.windows import Area, around, center_box, random_area_window, resampled, resize

Window = Callable[[Any], Any]
"""From an image's size, int32[2] (height, width), to the part to keep, int32[4] (top, left, height, width)."""

RGB = PixelFormat()
_JPEG, _PNG, _OTHER = range(3)
_log = logging.getLogger("jaxddp.data")
_said = threading.Lock()

# Of red, green and blue in gray, in 65536ths: Pillow's, of ITU-R BT.601, in integers.
_LUMA = (19595, 38470, 7471)

# Decoders can give a JPEG at a half, a quarter or an eighth of its size for less work.
_SCALES = (8, 4, 2)
# The exact cosine transform gives what Pillow gives; the coarse one, TensorFlow's default, is off by a few levels and
# saves a tenth of decoding.
_EXACT, _COARSE = "INTEGER_ACCURATE", "INTEGER_FAST"


def train_image(data: Any, key: Any, area: Area | None, image_size: int, pixels: PixelFormat = RGB) -> Any:
    """One training example, [image_size, image_size, C], of an encoded image and a row of `example_keys`.

    Args:
        area: of the random crop; the image stays whole where absent.
    """
    if area is None:
        return fitted_window(data, lambda size: tf.stack([0, 0, size[0], size[1]]), image_size, pixels=pixels)
    window = partial(random_area_window, key=key, area=area)
    return fitted_window(data, window, image_size, exact=False, pixels=pixels)


def eval_image(data: Any, image_size: int, resize: int, pixels: PixelFormat = RGB) -> Any:
    """One evaluation example, [image_size, image_size, C]: the short side resized to `resize`, then the center.

    The pixels are those of torchvision's Resize and CenterCrop, within a level of 255; only what the center needs is
    decoded. Where the short side is `resize` already, they are the image's own.
    """
    size = _size(data, pixels)
    box = center_box(size, image_size, resize)
    window = around(box, image_size, size)
    image = decode_window(data, lambda _: window, pixels=pixels)
    place = box - tf.cast(window[:2], tf.float64)
    center = tf.cond(tf.reduce_min(size) == resize, lambda: image, lambda: resampled(image, place, image_size))
    return tf.ensure_shape(center, [image_size, image_size, pixels.channels])


def fitted_window(data: Any, window: Window, image_size: int, *, exact: bool = True, pixels: PixelFormat = RGB) -> Any:
    """The part of the image that `window` names, resized: [image_size, image_size, C]; see `decode_window`."""
    return resize(decode_window(data, window, image_size, exact=exact, pixels=pixels), image_size)


def decodes(data: bytes, pixels: PixelFormat = RGB) -> None:
    """Raises `InputError` for an image that its decoder refuses."""
    kind = parse_header(data).kind
    if kind in get_args(PillowKind):
        _pillow_pixels(pixels, data)
        return
    try:
        tf.io.decode_image(data, channels=3, expand_animations=False)
    except tf.errors.OpError as error:
        raise InputError(f"does not decode ({error.message}); {AGAIN}") from None


def decode_window(
    data: Any, window: Window, least: int | None = None, *, exact: bool = True, pixels: PixelFormat = RGB
) -> Any:
    """The part of the image that `window` names, [height, width, C], of a file that `parse_header` accepts.

    Gray is repeated and CMYK converted to RGB; alpha is dropped where it is not asked for. A file that `parse_header`
    refuses is an error of TensorFlow's, even where its damage lies below the window.

    Args:
        least: a JPEG may be decoded at a half, a quarter or an eighth of its size, if no side of the window becomes
            shorter than this; at its own size where absent.
        exact: whether a JPEG's pixels are those of the whole image decoded. Otherwise they differ by a few levels,
            which does not matter to random crops, and are decoded faster.
        pixels: the result's format; every kind of file gives the same pixels for the same image.
    """
    kind = _kind(data, pixels)
    image = tf.cond(
        kind == _JPEG,
        lambda: _converted(_decode_jpeg(data, _checked_window(data, window), least, exact), pixels),
        lambda: _gray(_cut(_decode_whole(data, kind, pixels), window), pixels),
    )
    return tf.ensure_shape(image, [None, None, pixels.channels])


def _kind(data: Any, pixels: PixelFormat) -> Any:
    """Int32 scalar, of `_JPEG`, `_PNG`, `_OTHER`; an error for what `parse_header` refuses."""
    # Nearly every file passes this look at both ends; only the others are checked in Python, which is slow here.
    plain_jpeg = (tf.strings.substr(data, 0, 3) == JPEG_START) & (tf.strings.substr(data, -2, 2) == JPEG_END)
    return tf.cond(
        plain_jpeg, lambda: _JPEG, lambda: tf.numpy_function(partial(_parsed_kind, pixels), [data], tf.int32)
    )


def _size(data: Any, pixels: PixelFormat) -> Any:
    """Height and width in pixels, int32[2], as the header has them."""

    def of_png() -> Any:
        # IHDR is the first chunk of every PNG file, and begins with width and height.
        return tf.io.decode_raw(tf.strings.substr(data, 16, 8), tf.int32, little_endian=False)[::-1]

    def of_other() -> Any:
        return tf.numpy_function(_parsed_size, [data], tf.int32)

    kind = _kind(data, pixels)
    size = tf.cond(
        kind == _JPEG,
        lambda: tf.image.extract_jpeg_shape(data)[:2],
        lambda: tf.cond(kind == _PNG, of_png, of_other),
    )
    return tf.ensure_shape(size, [2])


def _plain(data: bytes | np.ndarray) -> bytes:
    # Bytes in a graph, an array that holds them outside of one.
    return np.asarray(data, object).item()


def _parsed_kind(pixels: PixelFormat, data: bytes | np.ndarray) -> np.int32:
    header = parse_header(_plain(data))
    if header.bits > pixels.bits:
        _say_cut()
    if header.kind == "png" and header.bits < 8 and pixels.channels == 4:
        # Where such a file has no alpha, TensorFlow gives it the largest value of so few bits.
        return np.int32(_OTHER)
    return np.int32({"jpeg": _JPEG, "png": _PNG}.get(header.kind, _OTHER))


def _say_cut() -> None:
    """Once, although many threads decode."""
    if _said.acquire(blocking=False):
        _log.warning("data.bits=8: there are images of 16 bits, whose upper 8 are used; set data.bits 16 to use all")


def _parsed_size(data: bytes | np.ndarray) -> np.ndarray:
    header = parse_header(_plain(data))
    return np.array([header.height, header.width], np.int32)


def _pillow_pixels(pixels: PixelFormat, data: bytes | np.ndarray) -> np.ndarray:
    data = _plain(data)
    kind: Any = parse_header(data).kind
    return decode_pillow(data, kind, _decoded_channels(pixels), pixels.bits)


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


def _decode_whole(data: Any, kind: Any, pixels: PixelFormat) -> Any:
    """A file that no decoder gives a part of, in RGB or RGBA: [H, W, 3 or 4], of the wanted bits."""
    channels, dtype = _decoded_channels(pixels), tf.as_dtype(pixels.dtype)

    def other() -> Any:
        image = tf.numpy_function(partial(_pillow_pixels, pixels), [data], dtype)
        return tf.ensure_shape(image, [None, None, channels])

    return tf.cond(kind == _PNG, lambda: tf.image.decode_png(data, channels=channels, dtype=dtype), other)


def _cut(image: Any, window: Window) -> Any:
    top, left, height, width = tf.unstack(window(tf.shape(image)[:2]))
    return image[top : top + height, left : left + width]


def _decoded_channels(pixels: PixelFormat) -> int:
    """Of what a decoder is asked for: RGBA where alpha is wanted, else RGB."""
    # TensorFlow's own gray of a PNG is a level off in places, so gray is made of RGB.
    return 4 if pixels.channels == 4 else 3


def _gray(image: Any, pixels: PixelFormat) -> Any:
    """RGB as its luma, where gray is wanted; of gray that was repeated, the same values."""
    if pixels.channels != 1:
        return image
    luma = tf.reduce_sum(tf.cast(image, tf.int64) * _LUMA, axis=-1, keepdims=True)
    return tf.cast((luma + (1 << 15)) // (1 << 16), image.dtype)


def _converted(image: Any, pixels: PixelFormat) -> Any:
    """RGB of 8 bits in the wanted format."""
    if pixels.channels == 4:
        image = tf.pad(image, [[0, 0], [0, 0], [0, 1]], constant_values=255)
    return _gray(image if pixels.bits == 8 else tf.cast(image, tf.uint16) * 257, pixels)
