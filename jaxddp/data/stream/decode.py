"""TensorFlow functions that decode an image to pixels of a fixed size, without flips and normalization."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.data.images.header import JPEG_END, JPEG_START, parse_header
from jaxddp.data.images.image_types import DOWNLOAD_AGAIN, MAX_PIXELS, PillowKind, PixelFormat
from jaxddp.data.images.pillow import decode_pillow
from jaxddp.data.stream.tensorflow_cpu import tf
from jaxddp.data.stream.windows import (
    Area,
    Interpolation,
    center_box,
    filter_window,
    random_area_window,
    resample,
    resample_bicubically,
    resize,
    resized_size,
)

Window = Callable[[Any], Any]
"""A function of the size of an image, int32[2] (height, width), to a crop, int32[4] (top, left, height, width)."""

RGB = PixelFormat()
_JPEG, _PNG, _OTHER = range(3)
_log = logging.getLogger("jaxddp.data")
_warned = threading.Lock()

# The weights of red, green and blue in gray, in 65536ths, as in Pillow (ITU-R BT.601).
_LUMA = (19595, 38470, 7471)

# A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size in less time.
_SCALES = (8, 4, 2)
# With the exact cosine transform, pixels equal those of Pillow. With the coarse transform, TensorFlow's default, they
# differ by a few levels, and decoding takes a tenth less time.
_EXACT, _COARSE = "INTEGER_ACCURATE", "INTEGER_FAST"


def train_image(
    data: Any,
    key: Any,
    area: Area | None,
    image_size: int,
    pixels: PixelFormat = RGB,
    interpolation: Interpolation = "bilinear",
) -> Any:
    """Return one training example, [image_size, image_size, C], from an encoded image and a row of `example_keys`.

    Args:
        area: the area of the random crop; None keeps the whole image.
    """
    decode = partial(decode_and_resize, data, image_size=image_size, pixels=pixels, interpolation=interpolation)
    if area is None:
        return decode(lambda size: tf.stack([0, 0, size[0], size[1]]))
    return decode(partial(random_area_window, key=key, area=area), exact=False)


def eval_image(
    data: Any,
    image_size: int,
    resize: int,
    pixels: PixelFormat = RGB,
    interpolation: Interpolation = "bilinear",
    *,
    squash: bool = False,
) -> Any:
    """Return one evaluation example, [image_size, image_size, C]: resize the short side to `resize`, crop the center.

    The pixels differ from those of torchvision's Resize and CenterCrop by at most one of 255 levels. Only the pixels
    that the center crop depends on are decoded. If an image has the size already, the pixels are not changed.

    Args:
        squash: whether both sides are resized to `resize`.
    """
    size = _size(data, pixels)
    resized = resized_size(size, resize, squash=squash)
    box = center_box(size, resized, image_size)
    window = filter_window(box, image_size, size, interpolation)
    image = decode_window(data, lambda _: window, pixels=pixels)
    place = box - tf.cast(window[:2], tf.float64)

    def resampled() -> Any:
        if interpolation == "bicubic":
            return resample_bicubically(image, place, image_size, size, resized)
        return resample(image, place, image_size)

    center = tf.cond(tf.reduce_all(tf.cast(size, tf.int64) == resized), lambda: image, resampled)
    return tf.ensure_shape(center, [image_size, image_size, pixels.channels])


def decode_and_resize(
    data: Any,
    window: Window,
    image_size: int,
    *,
    exact: bool = True,
    pixels: PixelFormat = RGB,
    interpolation: Interpolation = "bilinear",
) -> Any:
    """Decode the crop `window` of an image, and resize it to [image_size, image_size, C]; see `decode_window`."""
    if interpolation == "bicubic":
        # These pixels equal Pillow's, so a JPEG is decoded exactly, and at its full size.
        return resize(decode_window(data, window, pixels=pixels), image_size, interpolation)
    return resize(decode_window(data, window, image_size, exact=exact, pixels=pixels), image_size)


def check_decoding(data: bytes, pixels: PixelFormat = RGB) -> None:
    """Decode an image to check it, and discard the pixels. Raises: InputError if the decoder rejects the image."""
    kind = parse_header(data).kind
    if kind in get_args(PillowKind):
        _pillow_pixels(pixels, data)
        return
    try:
        tf.io.decode_image(data, channels=3, expand_animations=False)
    except tf.errors.OpError as error:
        raise InputError(f"does not decode ({error.message}); {DOWNLOAD_AGAIN}") from None


def decode_window(
    data: Any, window: Window, least: int | None = None, *, exact: bool = True, pixels: PixelFormat = RGB
) -> Any:
    """Decode the crop `window`, [height, width, C], of an image file that `parse_header` accepts.

    Gray is repeated as RGB, and CMYK is converted to RGB. Alpha is dropped if `pixels` has no alpha channel. A file
    that `parse_header` rejects causes a TensorFlow error, even if the damage is outside the window.

    Args:
        least: the smallest allowed side of the decoded crop. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the
            sides of the crop do not become shorter than this. With None, it is decoded at full size.
        exact: whether the pixels of a JPEG equal a crop of the whole decoded image. If False, decoding is faster, and
            pixels differ by a few levels, which is negligible for random crops.
        pixels: the format of the result. Files of different formats give the same pixels for the same image.
    """
    kind = _kind(data, pixels)
    image = tf.cond(
        kind == _JPEG,
        lambda: _converted(_decode_jpeg(data, _checked_window(data, window), least, exact), pixels),
        lambda: _gray(_crop(_decode_whole(data, kind, pixels), window), pixels),
    )
    return tf.ensure_shape(image, [None, None, pixels.channels])


def _kind(data: Any, pixels: PixelFormat) -> Any:
    """Return `_JPEG`, `_PNG` or `_OTHER`, an int32 scalar. It raises an error if `parse_header` rejects the file."""
    # The first and last bytes identify most JPEG files. Other files are parsed in Python, which is slow in a graph.
    plain_jpeg = (tf.strings.substr(data, 0, 3) == JPEG_START) & (tf.strings.substr(data, -2, 2) == JPEG_END)
    return tf.cond(
        plain_jpeg, lambda: _JPEG, lambda: tf.numpy_function(partial(_parsed_kind, pixels), [data], tf.int32)
    )


def _size(data: Any, pixels: PixelFormat) -> Any:
    """Return height and width in pixels, int32[2], from the header."""

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


def _as_bytes(data: bytes | np.ndarray) -> bytes:
    # TensorFlow passes bytes in a graph, and an array with the bytes in eager mode.
    return np.asarray(data, object).item()


def _parsed_kind(pixels: PixelFormat, data: bytes | np.ndarray) -> np.int32:
    header = parse_header(_as_bytes(data))
    if header.bits > pixels.bits:
        _warn_of_lost_bits()
    if header.kind == "png" and header.bits < 8 and pixels.channels == 4:
        # Without alpha in the file, TensorFlow would set alpha to the largest value of these few bits, instead of 255.
        return np.int32(_OTHER)
    return np.int32({"jpeg": _JPEG, "png": _PNG}.get(header.kind, _OTHER))


def _warn_of_lost_bits() -> None:
    """Log the warning once in a process, although many threads decode."""
    if _warned.acquire(blocking=False):
        _log.warning(
            "data.bits=8: some images have 16 bits, of which the upper 8 are used; set data.bits 16 to use all"
        )


def _parsed_size(data: bytes | np.ndarray) -> np.ndarray:
    header = parse_header(_as_bytes(data))
    return np.array([header.height, header.width], np.int32)


def _pillow_pixels(pixels: PixelFormat, data: bytes | np.ndarray) -> np.ndarray:
    data = _as_bytes(data)
    kind: Any = parse_header(data).kind
    return decode_pillow(data, kind, _decoded_channels(pixels), pixels.bits)


def _checked_window(data: Any, window: Window) -> Any:
    size = tf.image.extract_jpeg_shape(data)[:2]
    pixels = tf.reduce_prod(tf.cast(size, tf.int64))
    check = tf.debugging.Assert(pixels <= MAX_PIXELS, ["more pixels than the limit"])
    with tf.control_dependencies([check]):
        return tf.identity(window(size))


def _decode_jpeg(data: Any, part: Any, least: int | None, exact: bool) -> Any:
    """Decode the crop `part` at the smallest scale at which its sides are at least `least`; None means full size."""
    whole = partial(_decode_exactly if exact else _decode, data, part)
    if least is None:
        return whole()
    short = tf.reduce_min(part[2:])

    def scaled(scale: int) -> Any:
        # The crop in pixels of the scaled image, rounded outwards.
        start, stop = part[:2] // scale, -(-(part[:2] + part[2:]) // scale)
        return _decode(data, tf.concat([start, stop - start], 0), scale, _EXACT if exact else _COARSE)

    cases = [(short >= scale * least, partial(scaled, scale)) for scale in _SCALES]
    return tf.case(cases, default=whole)


def _decode_exactly(data: Any, part: Any) -> Any:
    """Decode a crop to the same pixels as in the whole decoded image, in less time."""
    _, left, _, width = tf.unstack(part)
    # Color is stored at half the resolution and interpolated between columns. At the left and right border of a crop,
    # the neighbor column is missing, so one more column is decoded on each side.
    first = tf.maximum(left - 1, 0)
    last = tf.minimum(left + width + 1, tf.image.extract_jpeg_shape(data)[1])
    image = _decode(data, tf.stack([part[0], first, part[2], last - first]), transform=_EXACT)
    return image[:, left - first : left - first + width]


def _decode(data: Any, part: Any, scale: int = 1, transform: str = _COARSE) -> Any:
    return tf.image.decode_and_crop_jpeg(data, part, channels=3, ratio=scale, dct_method=transform)


def _decode_whole(data: Any, kind: Any, pixels: PixelFormat) -> Any:
    """Decode a file that is not a JPEG to RGB or RGBA, [H, W, 3 or 4], with the bits of `pixels`."""
    channels, dtype = _decoded_channels(pixels), tf.as_dtype(pixels.dtype)

    def other() -> Any:
        image = tf.numpy_function(partial(_pillow_pixels, pixels), [data], dtype)
        return tf.ensure_shape(image, [None, None, channels])

    return tf.cond(kind == _PNG, lambda: tf.image.decode_png(data, channels=channels, dtype=dtype), other)


def _crop(image: Any, window: Window) -> Any:
    top, left, height, width = tf.unstack(window(tf.shape(image)[:2]))
    return image[top : top + height, left : left + width]


def _decoded_channels(pixels: PixelFormat) -> int:
    """Return the number of channels to decode: 4 if the format has alpha, else 3."""
    # TensorFlow's own conversion of a PNG to gray differs by one level for some pixels, so gray is computed from RGB.
    return 4 if pixels.channels == 4 else 3


def _gray(image: Any, pixels: PixelFormat) -> Any:
    """Convert RGB to gray if the format has one channel. An image that was gray gets its original values."""
    if pixels.channels != 1:
        return image
    luma = tf.reduce_sum(tf.cast(image, tf.int64) * _LUMA, axis=-1, keepdims=True)
    return tf.cast((luma + (1 << 15)) // (1 << 16), image.dtype)


def _converted(image: Any, pixels: PixelFormat) -> Any:
    """Convert 8-bit RGB to the format `pixels`."""
    if pixels.channels == 4:
        image = tf.pad(image, [[0, 0], [0, 0], [0, 1]], constant_values=255)
    return _gray(image if pixels.bits == 8 else tf.cast(image, tf.uint16) * 257, pixels)
