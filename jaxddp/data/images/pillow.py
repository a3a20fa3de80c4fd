"""Reads WebP, TIFF, BMP and PPM with Pillow, because TensorFlow cannot decode all such files."""

import ctypes
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from PIL import Image

from jaxddp.core.errors import InputError, Key
from jaxddp.data.images.image_types import DOWNLOAD_AGAIN, MAX_PIXELS, ImageHeader, PillowKind

_MODES = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"))
_GRAY16 = frozenset(("I;16", "I;16B", "I;16L"))
_DEPTHS = {1, 2, 4, 8, 16}
_MAX_BYTE = 255
_WIDEN = 257
"""65535 / 255, the factor from 8 to 16 bits."""
# Tags of TIFF 6.0, section 8.
_BITS_PER_SAMPLE, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0


def pillow_header(data: bytes, kind: PillowKind) -> ImageHeader:
    """Return the header of a file. Raises: InputError if it is damaged, or its pixels are not supported."""
    with _open_image(data, kind) as image:
        return ImageHeader(kind, image.height, image.width, bits=_checked_bits(image))


def check_pillow(data: bytes, kind: PillowKind) -> None:
    """Decode a file to its last pixel. Raises: InputError if it is cut short or damaged."""
    with _open_image(data, kind) as image:
        image.load()


def decode_pillow(data: bytes, kind: PillowKind, channels: int, bits: int) -> np.ndarray:
    """Return the pixels, uint8 or uint16 [H, W, channels]; `channels` is 3 or 4, as in `PixelFormat`.

    Raises:
        InputError: the file is damaged, or `bits` is 16 and the file has colors of 16 bits. Pillow would read only the
            upper 8 bits of these colors.
    """
    with _open_image(data, kind) as image:
        depth = _checked_bits(image)
        if image.mode in _GRAY16 or (kind == "ppm" and image.mode == "I"):
            gray = np.asarray(image).astype(np.uint16)
            rgba = np.stack([gray, gray, gray, np.full_like(gray, 0xFFFF)], axis=-1)[..., :channels]
            return rgba if bits == 16 else (rgba >> 8).astype(np.uint8)
        if depth == bits == 16:
            raise InputError(
                f"a {kind.upper()} with colors of 16 bits, of which only the upper 8 can be read",
                advice=("save it as PNG, or set ", Key("data.bits"), " 8"),
            )
        pixels = np.asarray(image.convert("RGBA"))[..., :channels]
        return pixels if bits == 8 else pixels * np.uint16(_WIDEN)


def _checked_bits(image: Image.Image) -> int:
    """Return the number of bits per value, at least 8.

    Raises: InputError if there are several images or unsupported values.
    """
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        raise InputError(f"holds {frames} images; keep one image per file")
    if image.format == "PPM":
        # Pillow's mode of gray with 16 bits is "I". For other values, the decoder has the largest value as an argument.
        arguments = image.tile[0][3]  # pyright: ignore[reportAttributeAccessIssue]: only an `ImageFile` has it
        return 16 if image.mode == "I" or (isinstance(arguments, tuple) and arguments[1] > _MAX_BYTE) else 8
    tags = getattr(image, "tag_v2", {})
    depths = {*tags.get(_BITS_PER_SAMPLE, (8,))}
    inverted = image.mode in _GRAY16 and tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
    if image.mode not in _MODES | _GRAY16 or not depths <= _DEPTHS or inverted:
        description = "16 bits with white as 0" if inverted else f"mode {image.mode} with {max(depths)} bits"
        raise InputError(f"pixels of {description}, which are not supported; convert it to 8 or 16 bits, gray or RGB")
    return max(8, *depths)


@contextmanager
def _open_image(data: bytes, kind: PillowKind) -> Iterator[Image.Image]:
    """Open a Pillow image, and turn any error of Pillow in the block into an `InputError`."""
    _libtiff_errors.lines = []
    try:
        with Image.open(io.BytesIO(data), formats=(kind.upper(),)) as image:
            yield image
        if _libtiff_errors.lines:
            raise InputError(f"damaged: {_libtiff_errors.lines[0]}; {DOWNLOAD_AGAIN}")
    except InputError:
        raise
    except Image.DecompressionBombError:
        raise InputError(f"more pixels than the limit of {MAX_PIXELS:,}; shrink it or leave it out") from None
    except Image.UnidentifiedImageError:
        raise InputError(f"damaged: no header of a {kind.upper()} file; {DOWNLOAD_AGAIN}") from None
    # A damaged header can cause any error.
    except Exception as error:
        reason = next(iter(_libtiff_errors.lines), None) or error or type(error).__name__
        raise InputError(f"damaged: {reason}; {DOWNLOAD_AGAIN}") from None


_libtiff_errors = threading.local()
"""`lines` holds libtiff's errors in the file that the current thread reads. Pillow does not report all of them."""


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
def _store_error(module: bytes | None, format_string: bytes | None, values: int | None) -> None:
    # The values are left out, because their C type differs between machines.
    # The file name is left out, because Pillow calls every file tempfile.tif.
    where = b"" if module is None or b"." in module else module
    words = [b"libtiff", where, (format_string or b"").partition(b"%")[0].strip()]
    getattr(_libtiff_errors, "lines", []).append(": ".join(word.decode(errors="replace") for word in words if word))


def _catch_libtiff_errors() -> None:
    """Make libtiff pass its errors to `_store_error`. By default it writes them to stderr without a file name."""
    # The symbols of a linked library are found through the extension module.
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(Image.core.__file__)
        for name, handler in (("TIFFSetErrorHandler", _store_error), ("TIFFSetWarningHandler", None)):
            set_handler = getattr(library, name)
            set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
            set_handler(ctypes.cast(handler, ctypes.c_void_p) if handler else None)


_catch_libtiff_errors()
