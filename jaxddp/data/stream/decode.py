"""Decode an image, crop it to a window and resize the crop to a square.

In training, windows are random. They are a function of a key of (seed, epoch, row), so they are the same in every
thread and on every host. An image that shrinks by a ratio of more than 1.6 is resized by area: an output pixel is the
mean of the input pixels that it covers (OpenCV's INTER_AREA). Other images are resized bilinearly. Up to a ratio of
1.6, bilinear sampling uses every pixel, and its result is as near to that of a Lanczos filter as the result of Pillow's
triangle filter, which takes eight times as long. At larger ratios, bilinear sampling would alias. See
benchmarks/RESULTS.md for measurements.

In evaluation, the short side is resized and the center is cropped as by torchvision's Resize and CenterCrop, because
published weights expect these pixels. Pillow resizes, as in torchvision. Bicubic resizing is Pillow's in training too.
"""

import hashlib
import logging
import math
import re
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, first_line
from jaxddp.data.batch import PixelFormat
from jaxddp.data.images import (
    DOWNLOAD_AGAIN,
    JPEG_END,
    JPEG_START,
    MAX_PIXELS,
    ImageHeader,
    decode_pillow,
    first_rows,
    parse_header,
    without_ancillary_chunks,
)

Window = tuple[int, int, int, int]
"""A crop (top, left, height, width) in pixels."""

RGB = PixelFormat()
_log = logging.getLogger("jaxddp.data")
_warned = threading.Lock()
# Images are decoded in parallel, each by one thread.
cv2.setNumThreads(1)

# The weights of red, green and blue in gray, in 65536ths, as in Pillow (ITU-R BT.601).
_LUMA = (19595, 38470, 7471)

# A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size in less time.
_SCALES = (8, 4, 2)
_PPM = re.compile(rb"P6\n(\d{1,5}) (\d{1,5})\n255\n")
"""The header of the files of `jaxddp data pack --pixels`."""
CROP_TRIES = 10
ASPECT = (3 / 4, 4 / 3)
"""The bounds of width / height of a crop of random area."""
_BILINEAR_TO = 1.6
"""The largest ratio of input length to output length at which an axis is resized bilinearly."""
_ASPECT_TO = 300
"""Of an image whose sides are more unequal than this, only the middle is resized."""
Interpolation = Literal["bilinear", "bicubic"]
Area = tuple[float, float]
"""The bounds of (area of the crop) / (area of the image), within 0..1."""


@dataclass(frozen=True)
class Pixels:
    """A function of an encoded image to pixels [image_size, image_size, C]."""

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
        area = None if data.crop == "whole" else data.crop_area
        resize = None if train else data.resize
        pixels, squash = PixelFormat(data.channels, data.bits), data.eval_crop == "squash"
        return cls(data.image_size, pixels, data.interpolation, area, resize, squash)

    def __call__(
        self, data: bytes, key: np.ndarray | None = None, header: ImageHeader | None = None, kept: "Kept | None" = None
    ) -> np.ndarray:
        """Return the pixels of an image. The crop depends on the key, a row of `example_keys`.

        Args:
            header: the header of the image, if it is already known.
            kept: the result of `keeping`, after the image was verified with it.

        Raises: InputError if the image does not decode.
        """
        header = quick_header(data) if header is None else header
        if self.resize is not None:
            return self._center(decode_image(data, header, pixels=self.format))
        window = self._window(header, key)
        # Bicubic pixels equal Pillow's, so a JPEG is decoded exactly, and at its full size.
        is_cubic = self.interpolation == "bicubic"
        exact = is_cubic or self.area is None
        least = None if is_cubic else self.image_size
        decoded = None if kept is None else kept.pixels
        image = decode_image(data, header, window, least, exact=exact, pixels=self.format, decoded=decoded)
        return resize(image, self.image_size, self.interpolation)

    def keeping(self, data: bytes, key: np.ndarray) -> "Kept | None":
        """Return a decoder with which `sound_image` verifies an image and keeps its pixels.

        None if these are not the pixels of a training crop: if all pixels must be exact, if a smaller image is decoded,
        or if the crop has the last row, whose colors depend on the rows that are added for the verification.
        """
        if self.area is None or self.resize is not None or self.interpolation == "bicubic" or data[:3] != JPEG_START:
            return None
        header = quick_header(data)
        top, _, height, _ = window = self._window(header, key)
        if top + height < header.height and _scale(window, self.image_size) == 1:
            with suppress(ValueError, KeyError):  # A damaged header, or a rare color sampling.
                return Kept(data)
        return None

    def _window(self, header: ImageHeader, key: np.ndarray | None) -> Window:
        if self.area is None or key is None:
            return 0, 0, header.height, header.width
        return random_area_window(header.height, header.width, key, self.area)

    def _center(self, image: np.ndarray) -> np.ndarray:
        """Resize the short side to `resize`, and crop the center, like torchvision's Resize and CenterCrop.

        Pixels are equal to theirs if no side is longer than `_ASPECT_TO` times the other.
        """
        side, resize, short = self.image_size, self.resize or self.image_size, min(image.shape[:2])
        # One row of 20,000 pixels would become 256 rows of 5,120,000.
        ends = [0 if self.squash else max(length - _ASPECT_TO * short, 0) // 2 for length in image.shape[:2]]
        image = image[ends[0] : image.shape[0] - ends[0], ends[1] : image.shape[1] - ends[1]]
        size = image.shape[:2]
        # As by torchvision 0.29's Resize, the length of the long side is rounded down. Its CenterCrop rounds the start
        # to an integer, halves to even.
        height, width = (resize if self.squash else resize * length // short for length in size)
        top, left = round((height - side) / 2), round((width - side) / 2)
        if (height, width) == size:
            return image[top : top + side, left : left + side]
        return _resample(image, (width, height), self.interpolation, (left, top, side))


class Kept:
    """A strict decoder of a JPEG for `sound_image`, which keeps the pixels.

    Attributes:
        pixels: uint8[H + added rows, W, 3]; None if the data were not decoded whole, or to other colors.
    """

    def __init__(self, data: bytes):
        self._colors, self.pixels = simplejpeg.decode_jpeg_header(data, strict=False)[2], None

    def __call__(self, data: bytes) -> None:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        image = np.empty((int(height), int(width), 3), np.uint8)
        try:
            simplejpeg.decode_jpeg(data, "RGB", fastdct=True, buffer=image)
        finally:
            # Without Adobe's marker, which is metadata, a decoder may take RGB for YCbCr.
            self.pixels = image if colors == self._colors != "CMYK" else None


def quick_header(data: bytes) -> ImageHeader:
    """Return the header of an image file; see `parse_header`. Of most JPEG files, only the beginning is read."""
    if data[:3] == JPEG_START and data[-2:] == JPEG_END:
        with suppress(ValueError, KeyError):
            height, width, *_ = simplejpeg.decode_jpeg_header(data, strict=False)
            if int(height) * int(width) <= MAX_PIXELS:
                return ImageHeader("jpeg", int(height), int(width))
    ppm = _pixels_of_ppm(data)
    return parse_header(data) if ppm is None else ImageHeader("ppm", *ppm.shape[:2])


def decode_image(
    data: bytes,
    header: ImageHeader,
    window: Window | None = None,
    least: int | None = None,
    *,
    exact: bool = True,
    pixels: PixelFormat = RGB,
    decoded: np.ndarray | None = None,
) -> np.ndarray:
    """Return the pixels of an image file, or of its crop `window`, [height, width, C].

    Gray is repeated as RGB, and CMYK is converted to RGB. Alpha is dropped if `pixels` has no alpha channel. Files of
    different formats give the same pixels for the same image.

    Args:
        least: the smallest allowed side of the decoded crop. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the
            sides of the crop do not become shorter than this; the crop is then rounded outwards. With None, or if
            Pillow decodes it, as CMYK, it is decoded at full size.
        exact: whether the pixels of a JPEG equal those of Pillow. If False, decoding is faster, and pixels differ by a
            few levels, which is negligible for random crops.
        pixels: the format of the result.
        decoded: the pixels of a JPEG, if it is already decoded; see `Kept`.

    Raises: InputError if the decoder rejects the image.
    """
    window = window or (0, 0, header.height, header.width)
    top, left, height, width = window
    # The lock is never released, so the warning is logged once in a process, although many threads decode.
    if header.bits > pixels.bits and _warned.acquire(blocking=False):
        _log.warning("data.bits=8: some images have 16 bits, of which the upper 8 are used; set data.bits 16 for all")
    image = decoded
    if header.kind == "jpeg" and decoded is None:
        needed = data if top + height == header.height else first_rows(data, top + height)
        image = _decode_jpeg(needed, _scale(window, least), exact)
    elif header.kind == "png" and header.bits == pixels.bits == 16:
        image = _decode_png16(_without_metadata(data, pixels))
    elif header.kind == "ppm":
        image = _pixels_of_ppm(data)
    if image is None:
        channels = 4 if pixels.channels == 4 else 3
        try:
            image = decode_pillow(data, header.kind, channels, pixels.bits)
        except InputError:
            if header.kind != "png":
                raise
            # Pillow rejects some metadata on which no pixel depends.
            image = decode_pillow(_without_metadata(data, pixels), header.kind, channels, pixels.bits)
    elif image.dtype != pixels.dtype:
        # 257 is 65535 / 255.
        image = image * np.uint16(257)
    # Pillow decodes at full size.
    scale = 1 if image.shape[1] == header.width else _scale(window, least)
    image = image[top // scale : -(-(top + height) // scale), left // scale : -(-(left + width) // scale)]
    if pixels.channels == 1:
        # An image that was gray gets its original values.
        if image.dtype == np.uint8:
            return np.asarray(Image.fromarray(image).convert("L"))[..., None]
        return ((image[..., :3] @ np.array(_LUMA) + (1 << 15)) >> 16).astype(image.dtype)[..., None]
    if pixels.channels > image.shape[2]:
        return np.concatenate([image, np.full_like(image[..., :1], np.iinfo(image.dtype).max)], axis=-1)
    return image[..., : pixels.channels]


def _decode_jpeg(data: bytes, scale: int, exact: bool) -> np.ndarray | None:
    """Return the pixels of a JPEG, uint8[H, W, 3]; None for CMYK, rare color samplings and other damage than the end.

    Raises: InputError if the image data end early.
    """
    image = None
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        if colors in ("CMYK", "YCCK"):
            return None
        image = np.empty((-(-int(height) // scale), -(-int(width) // scale), 3), np.uint8)
        least: Any = {"min_height": image.shape[0], "min_width": image.shape[1], "min_factor": scale}
        return simplejpeg.decode_jpeg(data, "RGB", fastdct=not exact, buffer=image, **least if scale > 1 else {})
    except (ValueError, KeyError) as error:
        if "premature end" in str(error):
            raise InputError(f"damaged: {first_line(error)}; {DOWNLOAD_AGAIN}") from None
        # These are the data after the first rows of an image, or stray bytes.
        return image if "extraneous bytes" in str(error) else None


def _pixels_of_ppm(data: bytes) -> np.ndarray | None:
    """Return the pixels of a PPM of 8 bits, uint8[H, W, 3], without a copy; None for other data."""
    if header := _PPM.match(data):
        width, height = int(header[1]), int(header[2])
        if len(data) - header.end() == 3 * height * width > 0:
            return np.frombuffer(data, np.uint8, offset=header.end()).reshape(height, width, 3)
    return None


def _without_metadata(data: bytes, pixels: PixelFormat) -> bytes:
    """Return a PNG without metadata, about which libpng also writes lines to stderr; unchanged if it is damaged."""
    with suppress(ValueError, struct.error):
        return without_ancillary_chunks(data, *[b"tRNS"] * (pixels.channels == 4))
    return data


def _decode_png16(data: bytes) -> np.ndarray | None:
    """Return the pixels of a PNG of 16 bits, uint16[H, W, 3 or 4]; None if it has no colors."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if image is None:
        raise InputError(f"damaged: it does not decode; {DOWNLOAD_AGAIN}")
    if image.ndim == 2:
        return None
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB if image.shape[2] == 3 else cv2.COLOR_BGRA2RGBA)


def _scale(window: Window, least: int | None) -> int:
    return next((scale for scale in _SCALES if least is not None and min(window[2:]) >= scale * least), 1)


def example_keys(seed: int, epoch: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return a random key for each example of a batch, uint64[B, 2]; epochs and rows are int32[B]."""
    return np.stack([np.full(len(row), seed, np.uint64), epoch.astype(np.uint64) << 32 | row.astype(np.uint64)], axis=1)


def random_area_window(full_height: int, full_width: int, key: np.ndarray, area: Area) -> Window:
    """Return a random window of an image, as in the training of Inception.

    The area is uniform in `area` times the area of the image, the aspect is log-uniform in `ASPECT`, and the position
    is uniform among the positions inside the image. The first of `CROP_TRIES` draws that fits is used. If no draw fits,
    the largest central window with an aspect within the bounds is used. (Szegedy et al., "Going deeper with
    convolutions", CVPR 2015, section 6; the tries and the fallback are those of torchvision's RandomResizedCrop.)

    Args:
        key: a row of `example_keys`.
    """
    (least, most), (narrow, wide) = area, map(math.log, ASPECT)
    for draw in range(CROP_TRIES):
        # A digest takes a tenth of the time of a generator of NumPy.
        digest = hashlib.blake2b(key.tobytes() + bytes([draw]), digest_size=32).digest()
        part, shape, top, left = ((number >> 11) * 2.0**-53 for number in struct.unpack("<4Q", digest))
        side = math.sqrt((least + part * (most - least)) * full_height * full_width)
        stretch = math.exp((narrow + shape * (wide - narrow)) / 2)
        height, width = round(side / stretch), round(side * stretch)
        if 1 <= height <= full_height and 1 <= width <= full_width:
            return int(top * (full_height - height + 1)), int(left * (full_width - width + 1)), height, width
    height = min(full_height, max(round(full_width / ASPECT[0]), 1))
    width = min(full_width, max(round(full_height * ASPECT[1]), 1))
    return (full_height - height) // 2, (full_width - width) // 2, height, width


def resize(image: np.ndarray, image_size: int, interpolation: Interpolation = "bilinear") -> np.ndarray:
    """Resize [H, W, C] to [image_size, image_size, C] of the same dtype, rounded. An image of that size is unchanged.

    If the ratio of one axis is above 1.6, bilinear interpolation resizes both axes by area, except for an axis that is
    enlarged.
    """
    height, width, channels = image.shape
    square = image_size, image_size
    if (height, width) == square:
        return image
    if interpolation == "bicubic":
        return _resample(image, square, "bicubic")
    # OpenCV resizes float32 more exactly than integers, and by area in two thirds of the time.
    values = image.astype(np.float32)
    if max(height, width) > int(_BILINEAR_TO * image_size):
        values = cv2.resize(values, (min(width, image_size), min(height, image_size)), interpolation=cv2.INTER_AREA)
    values = cv2.resize(values, square, interpolation=cv2.INTER_LINEAR).reshape(*square, channels)
    # Every value is a mean of pixels, so its rounded value is in the range of the dtype.
    return np.rint(values, out=values).astype(image.dtype)


def _resample(
    image: np.ndarray, size: tuple[int, int], interpolation: Interpolation, part: tuple[int, int, int] | None = None
) -> np.ndarray:
    """Resize [H, W, C] to a size (width, height) with Pillow. Of a part (left, top, side), return only this square."""
    method = Image.Resampling[interpolation.upper()]

    def resized(pixels: np.ndarray) -> Image.Image:
        return _part(pixels, size, method, *part) if part else Image.fromarray(pixels).resize(size, method)

    if image.dtype == np.uint8 and image.shape[2] == 3:
        return np.asarray(resized(image))
    # Pillow resizes RGBA as colors that are multiplied by alpha, and of 16 bits only single channels.
    planes = np.moveaxis(image if image.dtype == np.uint8 else image.astype(np.float32), -1, 0)
    levels = np.rint(np.stack([np.asarray(resized(np.ascontiguousarray(plane))) for plane in planes], axis=-1))
    return np.clip(levels, 0, np.iinfo(image.dtype).max).astype(image.dtype)


def _part(pixels: np.ndarray, size: tuple[int, int], method: Any, left: int, top: int, side: int) -> Image.Image:
    """Return a square of `Image.fromarray(pixels).resize(size, method)`, whose pixels are equal, in less time."""
    (length, across), (width, height) = pixels.shape[:2], size
    # Pillow 13 resizes high images vertically first, and every Pillow the others horizontally first.
    if length > across:
        return Image.fromarray(pixels).resize(size, method).crop((left, top, left + side, top + side))
    begin, end, low, high = 0, length, 0.0, float(length)
    # Pillow takes the ends of an axis in float32. Those of the square are exact if the height is a power of two, as 256
    # is. Then only the rows that the filter reaches are resized.
    if height & (height - 1) == 0 and length * height <= 1 << 24:
        low, high, reach = top * length / height, (top + side) * length / height, 2 * max(1, length / height) + 1
        begin, end = max(int(low - reach), 0), min(int(high + reach) + 1, length)
        height, top = side, 0
    rows = Image.fromarray(pixels[begin:end]).resize((width, end - begin), method)
    columns = rows.crop((left, 0, left + side, end - begin))
    columns = columns.resize((side, height), method, (0, low - begin, side, high - begin))
    return columns.crop((0, top, side, top + side))
