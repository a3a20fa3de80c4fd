"""TensorFlow functions that decode an image, crop it to a window and resize the crop to a square.

In training, windows are random. They are drawn by stateless ops from a key of (seed, epoch, row), so they are the same
in every thread and on every host. An image that shrinks by a ratio of more than 1.6 is resized by area: an output pixel
is the mean of the input pixels that it covers, as in OpenCV's INTER_AREA. Other images are resized bilinearly. Up to a
ratio of 1.6, bilinear sampling uses every pixel, and its result is as near to that of a Lanczos filter as the result of
Pillow's triangle filter (TensorFlow's `antialias=True`, which took longer than decoding). At larger ratios, bilinear
sampling would alias. See benchmarks/RESULTS.md for measurements.

In evaluation, the short side is resized and the center is cropped as by torchvision's Resize and CenterCrop, because
published weights expect these pixels. torchvision uses an antialiased triangle filter at subpixel positions. Here, one
op resizes and crops, so only the pixels that the center crop depends on are read.

Bicubic resizing is that of Pillow in training as well: antialiased, and rounded to whole levels and clipped after each
direction. Some weights are negative, so a value may be outside the range of pixels.
"""

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.data.batch import PixelFormat
from jaxddp.data.images import (
    DOWNLOAD_AGAIN,
    JPEG_END,
    JPEG_START,
    MAX_PIXELS,
    decode_pillow,
    parse_header,
)
from jaxddp.data.stream.tensorflow_cpu import tf

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
CROP_TRIES = 10
ASPECT = (3 / 4, 4 / 3)
"""The bounds of width / height of a crop of random area."""
_BILINEAR_TO = 1.6
"""The largest ratio of input length to output length at which an axis is resized bilinearly."""
Interpolation = Literal["bilinear", "bicubic"]
_REACH = {"bilinear": 1, "bicubic": 2}
"""The reach of each interpolation's kernel, in pixels."""
Area = tuple[float, float]
"""The bounds of (area of the crop) / (area of the image), within 0..1."""


@dataclass(frozen=True)
class Pixels:
    """A function of an encoded image, a string scalar, to pixels [image_size, image_size, C]."""

    image_size: int
    format: PixelFormat = RGB
    interpolation: Interpolation = "bilinear"
    area: Area | None = None
    """The area of training crops; None for whole images."""
    resize: int | None = None
    """The short side of images in evaluation; None in training."""
    squash: bool = False
    """Whether both sides are resized to `resize`."""

    @classmethod
    def of(cls, data: DataConfig, *, train: bool) -> "Pixels":
        """Return the function of a config."""
        area, resize = None if data.crop == "whole" else data.crop_area, None if train else data.resize
        pixels, squash = PixelFormat(data.channels, data.bits), data.eval_crop == "squash"
        return cls(data.image_size, pixels, data.interpolation, area, resize, squash)

    def __call__(self, data: Any, key: Any = None) -> Any:
        """Return the pixels of an image. The crop depends on the key, a row of `example_keys`."""
        if self.resize is not None:
            return self._center(data, self.resize)
        if self.area is None:
            return decode_and_resize(data, lambda size: tf.concat([[0, 0], size], 0), self)
        return decode_and_resize(data, partial(random_area_window, key=key, area=self.area), self, exact=False)

    def _center(self, data: Any, resize: int) -> Any:
        """Resize the short side to `resize`, and crop the center.

        The pixels differ from those of torchvision's Resize and CenterCrop by at most one of 255 levels. Only the
        pixels that the center crop depends on are decoded. An image of the size already is not changed.
        """
        size = _header(data, self.format)[1:]
        resized = resized_size(size, resize, squash=self.squash)
        box = center_box(size, resized, self.image_size)
        window = filter_window(box, self.image_size, size, self.interpolation)
        image = decode_window(data, lambda _: window, pixels=self.format)
        place = box - tf.cast(window[:2], tf.float64)

        def resampled() -> Any:
            if self.interpolation == "bicubic":
                return resample_bicubically(image, place, self.image_size, size, resized)
            return _resample(image, place, self.image_size)

        center = tf.cond(tf.reduce_all(tf.cast(size, tf.int64) == resized), lambda: image, resampled)
        return tf.ensure_shape(center, [self.image_size, self.image_size, self.format.channels])


def decode_and_resize(data: Any, window: Window, pixels: Pixels, *, exact: bool = True) -> Any:
    """Decode the crop `window` of an image, and resize it to [image_size, image_size, C]; see `decode_window`."""
    # Bicubic pixels equal Pillow's, so a JPEG is decoded exactly, and at its full size.
    is_cubic = pixels.interpolation == "bicubic"
    least = None if is_cubic else pixels.image_size
    image = decode_window(data, window, least, exact=exact or is_cubic, pixels=pixels.format)
    return resize(image, pixels.image_size, pixels.interpolation)


def check_decoding(data: bytes, pixels: PixelFormat = RGB) -> None:
    """Decode an image to check it, and discard the pixels. Raises: InputError if the decoder rejects the image."""
    kind = parse_header(data).kind
    if kind not in ("jpeg", "png"):
        decode_pillow(data, kind, 4, pixels.bits)
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
    header = _header(data, pixels)
    part = window(header[1:])
    top, left, height, width = tf.unstack(part)
    # TensorFlow's own conversion of a PNG to gray differs by one level for some pixels, so gray is computed from RGB.
    channels, dtype = 4 if pixels.channels == 4 else 3, tf.as_dtype(pixels.dtype)

    def jpeg() -> Any:
        image = _decode_jpeg(data, part, header[2], least, exact)
        if channels == 4:
            image = tf.pad(image, [[0, 0], [0, 0], [0, 1]], constant_values=255)
        return image if pixels.bits == 8 else tf.cast(image, tf.uint16) * 257

    def png() -> Any:
        return tf.image.decode_png(data, channels=channels, dtype=dtype)[top : top + height, left : left + width]

    def other() -> Any:
        image = tf.numpy_function(partial(_pillow_pixels, pixels, channels), [data], dtype)
        return tf.ensure_shape(image, [None, None, channels])[top : top + height, left : left + width]

    image = tf.switch_case(header[0], {_JPEG: jpeg, _PNG: png, _OTHER: other})
    if pixels.channels == 1:
        # An image that was gray gets its original values.
        luma = tf.reduce_sum(tf.cast(image, tf.int64) * _LUMA, axis=-1, keepdims=True)
        image = tf.cast((luma + (1 << 15)) // (1 << 16), image.dtype)
    return tf.ensure_shape(image, [None, None, pixels.channels])


def _header(data: Any, pixels: PixelFormat) -> Any:
    """Return `_JPEG`, `_PNG` or `_OTHER`, height and width in pixels, int32[3].

    It raises an error if `parse_header` rejects the file.
    """

    def of_jpeg() -> Any:
        size = tf.image.extract_jpeg_shape(data)[:2]
        few = tf.reduce_prod(tf.cast(size, tf.int64)) <= MAX_PIXELS
        with tf.control_dependencies([tf.debugging.Assert(few, ["more pixels than the limit"])]):
            return tf.concat([[_JPEG], size], 0)

    # The first and last bytes identify most JPEG files. Other files are parsed in Python, which is slow in a graph.
    plain_jpeg = (tf.strings.substr(data, 0, 3) == JPEG_START) & (tf.strings.substr(data, -2, 2) == JPEG_END)
    parsed = partial(tf.numpy_function, partial(_parsed_header, pixels), [data], tf.int32)
    return tf.ensure_shape(tf.cond(plain_jpeg, of_jpeg, parsed), [3])


def _parsed_header(pixels: PixelFormat, data: bytes | np.ndarray) -> np.ndarray:
    # TensorFlow passes bytes in a graph, and an array with the bytes in eager mode.
    header = parse_header(np.asarray(data, object).item())
    # The lock is never released, so the warning is logged once in a process, although many threads decode.
    if header.bits > pixels.bits and _warned.acquire(blocking=False):
        _log.warning("data.bits=8: some images have 16 bits, of which the upper 8 are used; set data.bits 16 for all")
    # Without alpha in a PNG, TensorFlow would set alpha to the largest value of its few bits, instead of 255.
    is_other = header.bits < 8 and pixels.channels == 4
    kind = _OTHER if is_other else {"jpeg": _JPEG, "png": _PNG}.get(header.kind, _OTHER)
    return np.array([kind, header.height, header.width], np.int32)


def _pillow_pixels(pixels: PixelFormat, channels: int, data: bytes | np.ndarray) -> np.ndarray:
    encoded = np.asarray(data, object).item()
    kind: Any = parse_header(encoded).kind
    return decode_pillow(encoded, kind, channels, pixels.bits)


def _decode_jpeg(data: Any, part: Any, full_width: Any, least: int | None, exact: bool) -> Any:
    """Decode the crop `part` at the smallest scale at which its sides are at least `least`; None means full size."""
    decode = partial(tf.image.decode_and_crop_jpeg, data, channels=3, dct_method=_EXACT if exact else _COARSE)

    def whole() -> Any:
        if not exact:
            return decode(part)
        # Color is stored at half the resolution and interpolated between columns. At the left and right border of a
        # crop, the neighbor column is missing, so one more column is decoded on each side.
        top, left, height, width = tf.unstack(part)
        first = tf.maximum(left - 1, 0)
        last = tf.minimum(left + width + 1, full_width)
        return decode(tf.stack([top, first, height, last - first]))[:, left - first : left - first + width]

    def scaled(scale: int) -> Any:
        # The crop in pixels of the scaled image, rounded outwards.
        start, stop = part[:2] // scale, -(-(part[:2] + part[2:]) // scale)
        return decode(tf.concat([start, stop - start], 0), ratio=scale)

    if least is None:
        return whole()
    short = tf.reduce_min(part[2:])
    return tf.case([(short >= scale * least, partial(scaled, scale)) for scale in _SCALES], default=whole)


def example_keys(seed: int, epoch: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return a random key for each example of a batch, int64[B, 2]; epochs and rows are int32[B]."""
    return np.stack([np.full(len(row), seed, np.int64), epoch.astype(np.int64) << 32 | row.astype(np.int64)], axis=1)


def random_area_window(size: Any, key: Any, area: Area) -> Any:
    """Return a random window of an image, int32[4] (top, left, height, width), as in the training of Inception.

    The area is uniform in `area` times the area of the image, the aspect is log-uniform in `ASPECT`, and the position
    is uniform among the positions inside the image. The first of `CROP_TRIES` draws that fits is used. If no draw fits,
    the largest central window with an aspect within the bounds is used. (Szegedy et al., "Going deeper with
    convolutions", CVPR 2015, section 6; the tries and the fallback are those of torchvision's RandomResizedCrop.)
    """
    bounds = tf.constant([area, tuple(map(math.log, ASPECT)), (0, 1), (0, 1)], tf.float32)
    # The algorithm is explicit, because the default may differ between devices and releases.
    draws = tf.random.stateless_uniform([4, CROP_TRIES], key, alg="philox")
    part, log_aspect, top, left = tf.unstack(bounds[:, :1] + draws * (bounds[:, 1:] - bounds[:, :1]))
    full_height, full_width = tf.unstack(tf.cast(size, tf.float32))
    side, stretch = tf.sqrt(part * full_height * full_width), tf.exp(log_aspect / 2)
    height, width = tf.round(side / stretch), tf.round(side * stretch)
    fits = (height >= 1) & (height <= full_height) & (width >= 1) & (width <= full_width)

    # In float32, the product can be rounded up to one more than the last position.
    top = tf.minimum(tf.floor(top * (full_height - height + 1)), full_height - height)
    left = tf.minimum(tf.floor(left * (full_width - width + 1)), full_width - width)
    # The weights decrease, because argmax may return any index of several equal values.
    first = tf.argmax(tf.cast(fits, tf.int32) * tf.range(CROP_TRIES, 0, -1))
    drawn = tf.cast(tf.stack([top, left, height, width])[:, first], tf.int32)
    height = tf.minimum(full_height, tf.maximum(tf.round(full_width / ASPECT[0]), 1))
    width = tf.minimum(full_width, tf.maximum(tf.round(full_height * ASPECT[1]), 1))
    central = tf.cast(tf.stack([(full_height - height) // 2, (full_width - width) // 2, height, width]), tf.int32)
    return tf.where(fits[first], drawn, central)


def resize(image: Any, image_size: int, interpolation: Interpolation = "bilinear") -> Any:
    """Resize [H, W, C] to [image_size, image_size, C] of the same dtype, rounded. An image of that size is unchanged.

    If the ratio of one axis is above 1.6, bilinear interpolation resizes both axes by area, except for an axis that is
    enlarged.
    """
    shape, square = tf.shape(image)[:2], [image_size, image_size]
    if interpolation == "bicubic":
        whole = tf.cast(tf.stack([tf.zeros_like(shape), shape]), tf.float64)
        pixels = resample_bicubically(image, whole, image_size, shape, square)
        return tf.ensure_shape(pixels, [*square, image.shape[-1]])
    resample_bilinearly = partial(tf.raw_ops.ResizeBilinear, size=square, half_pixel_centers=True)

    def by_area() -> Any:
        smaller = tf.raw_ops.ResizeArea(images=image[None], size=tf.minimum(shape, image_size))
        return resample_bilinearly(images=smaller)

    is_large = tf.reduce_any(shape > int(_BILINEAR_TO * image_size))
    pixels = tf.cond(is_large, by_area, lambda: resample_bilinearly(images=image[None]))
    # Every value is a mean of pixels, so its rounded value is in the range of the dtype.
    return tf.ensure_shape(tf.cast(tf.round(pixels[0]), image.dtype), [*square, image.shape[-1]])


def resized_size(size: Any, resize: int, *, squash: bool = False) -> Any:
    """Return height and width of the whole image in evaluation before the center is cropped, int64[2].

    As by torchvision 0.29's Resize, the short side is resized to `resize` pixels, and the length of the long side is
    rounded down.

    Args:
        size: int32[2], height and width of the image.
        squash: whether both sides are resized to `resize` pixels instead.
    """
    size = tf.cast(size, tf.int64)
    return tf.fill([2], tf.constant(resize, tf.int64)) if squash else resize * size // tf.reduce_min(size)


def center_box(size: Any, resized: Any, image_size: int) -> Any:
    """Return the box of the center crop, float64[2, 2], in pixels of the original image.

    The first axis is (start, stop), the second (rows, columns). The crop has the central `image_size` pixels of both
    sides of the resized image. As by torchvision 0.29's CenterCrop, its start is rounded to an integer, halves to even.

    Args:
        size: int32[2], height and width of the image.
        resized: int64[2], see `resized_size`.
    """
    spare = resized - image_size
    start = spare // 2 + tf.cast(spare % 4 == 3, tf.int64)
    edges = tf.cast(tf.stack([start, start + image_size]), tf.float64)
    size, resized = tf.cast(size, tf.float64), tf.cast(resized, tf.float64)
    # Without a resize, this order of operations is exact. With a resize, rounding could move the last edge outside.
    return tf.minimum(edges * (size / resized), size)


def filter_window(box: Any, image_size: int, size: Any, interpolation: Interpolation = "bilinear") -> Any:
    """Return the window that the filter reads, int32[4] (top, left, height, width), to resize a box of an image.

    If the box is not resized, the window is the box.
    """
    scale = (box[1] - box[0]) / image_size
    reach = tf.where(scale == 1, tf.zeros_like(scale), _REACH[interpolation] * tf.maximum(scale, 1))
    start = tf.maximum(tf.cast(tf.floor(box[0] - reach), tf.int32), 0)
    stop = tf.minimum(tf.cast(tf.math.ceil(box[1] + reach), tf.int32), size)
    return tf.concat([start, stop - start], 0)


def resample_bicubically(image: Any, box: Any, image_size: int, size: Any, resized: Any) -> Any:
    """Resize the box of an image, [H, W, C], to [image_size, image_size, C] of the same dtype, as Pillow does.

    Pillow resizes along the columns first if the height shrinks, and by more than twice as many pixels as the width
    (measured with Pillow 13.0). The order changes pixels at edges, because values are clipped in between.

    Args:
        size, resized: integers [2], height and width of the whole image before and after Pillow's resizing.
    """

    def levels(values: Any) -> Any:
        # Pillow rounds exact halves up. Rounding errors of float32 are smaller than the added 2**-15.
        return tf.clip_by_value(tf.floor(values + (0.5 + 2**-15)), 0, image.dtype.max)

    def columns_first() -> Any:
        turned = _resample(tf.transpose(image, [1, 0, 2]), box[:, ::-1], image_size, levels)
        return tf.transpose(turned, [1, 0, 2])

    height_loss, width_loss = tf.unstack(tf.cast(size, tf.int64) - tf.cast(resized, tf.int64))
    is_rows_first = (height_loss > 0) & (height_loss > 2 * width_loss)
    return tf.cond(is_rows_first, lambda: _resample(image, box, image_size, levels), columns_first)


def _resample(image: Any, box: Any, image_size: int, levels: Callable[[Any], Any] | None = None) -> Any:
    """Resize the box of an image, [H, W, C], to [image_size, image_size, C] of the same dtype, first its rows.

    Args:
        levels: for bicubic resizing, a function of the values after each direction, float32, to whole levels. By
            default, resizing is bilinear, and values are rounded at the end: every value is a mean of pixels, so its
            rounded value is in the range of the dtype.
    """
    kernel = "triangle" if levels is None else "keyscubic"
    resized = partial(tf.raw_ops.ScaleAndTranslate, size=[image_size, 1], kernel_type=kernel, antialias=True)
    ratio = image_size / (box[1] - box[0])
    scale, translation = tf.cast(ratio, tf.float32), tf.cast(-box[0] * ratio, tf.float32)
    height, width, channels = tf.unstack(tf.shape(image))

    def resample_rows(values: Any, axis: int) -> Any:
        """Resize the first axis of [length, N] to image_size."""
        # TensorFlow's op resizes columns of pixels with many channels in a quarter of the time of rows of pixels.
        factors, shifts = tf.stack([scale[axis], 1.0]), tf.stack([translation[axis], 0.0])
        return resized(images=values[None, :, None], scale=factors, translation=shifts)[0, :, 0]

    rows = resample_rows(tf.reshape(image, [height, width * channels]), 0)
    rows = levels(rows) if levels else rows
    # A matrix is transposed in half the time of pixels. The axes are then columns, channels and rows.
    turned = tf.reshape(tf.transpose(rows), [width, channels * image_size])
    pixels = tf.cast((levels or tf.round)(resample_rows(turned, 1)), image.dtype)
    turned_back = tf.transpose(tf.reshape(pixels, [image_size * channels, image_size]))
    return tf.reshape(turned_back, [image_size, image_size, channels])
