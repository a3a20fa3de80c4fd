"""The header of an image file, the marker segments of a JPEG, and the kinds of files that only Pillow can read.

Nothing of a JPEG (ITU-T T.81, B.1.1) or PNG is decoded here. Finding the segments of a file of 53 kB takes 28
microseconds; Pillow takes 20 to read the header alone. WebP, TIFF, BMP and PPM are read with Pillow, because TensorFlow
cannot decode all such files.
"""

import ctypes
import io
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

from jaxddp.core.errors import InputError, Key

MAX_PIXELS = 100_000_000
"""The largest number of pixels of an image. Without a limit, a file of a few kilobytes could need gigabytes."""

DOWNLOAD_AGAIN = "download it again or leave it out"
"""The advice for a damaged file."""

PillowKind = Literal["webp", "tiff", "bmp", "ppm"]
"""The kinds of files that Pillow decodes; "ppm" is also PGM and PBM."""
Kind = Literal["jpeg", "png"] | PillowKind
JPEG_START = b"\xff\xd8\xff"
JPEG_END = b"\xff\xd9"
PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
DHT, EOI, SOS, DRI = 0xC4, 0xD9, 0xDA, 0xDD
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
PROGRESSIVE = frozenset((0xC2, 0xC6, 0xCA, 0xCE))
# Frames with Huffman codes. Frames with arithmetic codes are rejected, although training could decode them. Any bytes
# are valid arithmetic codes, and the decoder continues past the end of the data, so it cannot detect missing data.
HUFFMAN_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
APP0, APP14, COMMENT = 0xE0, 0xEE, 0xFE
# The marker of a segment. A stuffed zero in entropy-coded data and a restart marker begin no segment.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd8\xff]")
_STARTS: tuple[tuple[bytes, PillowKind], ...] = (
    (rb"RIFF....WEBP", "webp"),
    (rb"II[*+]\0|MM\0[*+]", "tiff"),
    (rb"BM", "bmp"),
    (rb"P[1-6][ \t\r\n#]", "ppm"),
)
_MODES = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"))
_GRAY16 = frozenset(("I;16", "I;16B", "I;16L"))
_DEPTHS = {1, 2, 4, 8, 16}
_MAX_BYTE = 255
_WIDEN = 257
"""65535 / 255, the factor from 8 to 16 bits."""
# Tags of TIFF 6.0, section 8.
_BITS_PER_SAMPLE, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
_libtiff_errors = threading.local()
"""`lines` holds libtiff's errors in the file that the current thread reads. Pillow does not report all of them."""


@dataclass(frozen=True)
class ImageHeader:
    """The kind of a file, read from its content and not its name, and the size of its image in pixels."""

    kind: Kind
    height: int
    width: int
    left_over: int = field(default=0, compare=False)
    """The number of bytes after the image data on which no pixel depends; `verify` counts them."""
    bits: int = field(default=8, compare=False)
    """The bits of a value: 1, 2, 4, 8 or 16 in a PNG; in other kinds 16, or 8 if the values have 8 bits or fewer."""


def parse_header(data: bytes, segments: Sequence["Segment"] | None = None) -> ImageHeader:
    """Return the header of a complete JPEG or PNG file, or of a WebP, TIFF, BMP or PPM file.

    A JPEG is complete if the end-of-image marker (ITU-T T.81, B.1.1.3) follows its last scan. Bytes after that marker
    are accepted, as by every decoder (cameras append their own data). A marker inside an embedded thumbnail does not
    count. A PNG is complete if it holds its closing IEND chunk. Only `verify` reads the other kinds to their end.

    Args:
        segments: the segments of a JPEG, if they are already known.

    Raises:
        InputError: the file is empty or cut short, has no pixels or more than `MAX_PIXELS`, holds several images, is a
            JPEG without Huffman codes, or is of another kind.
    """
    if not data:
        raise InputError(f"empty file; {DOWNLOAD_AGAIN}")
    kind: PillowKind | None = next((each for start, each in _STARTS if re.match(start, data[:12], re.DOTALL)), None)
    if data.startswith(JPEG_START):
        header, end = _scan_jpeg(data, jpeg_segments(data) if segments is None else segments)
    elif data.startswith(PNG_START):
        size = {"height": int.from_bytes(data[20:24]), "width": int.from_bytes(data[16:20])}
        # The bit depth follows width and height. If it is damaged, 8 is used.
        bits = data[24] if len(data) > 24 and data[24] in (1, 2, 4, 8, 16) else 8
        header = ImageHeader("png", **size, bits=bits)
        end = None if PNG_END in data else "IEND chunk"
    elif kind is not None:
        with _open_image(data, kind) as image:
            header, end = ImageHeader(kind, image.height, image.width, bits=_checked_bits(image)), None
    else:
        description = "a GIF" if data.startswith(b"GIF8") else f"a file that starts with {data[:4]!r}"
        raise InputError(f"not a JPEG, PNG, WebP, TIFF, BMP or PPM but {description}; convert it or leave it out")
    if header.height * header.width > MAX_PIXELS:
        size = f"{header.width}x{header.height} pixels"
        raise InputError(f"{size}, more than the limit of {MAX_PIXELS:,}; shrink it or leave it out")
    if end is not None:
        raise InputError(f"cut short: no {end} at the end; {DOWNLOAD_AGAIN}")
    if not header.height or not header.width:
        raise InputError(f"damaged: its header says {header.width}x{header.height} pixels; {DOWNLOAD_AGAIN}")
    return header


def _scan_jpeg(data: bytes, segments: Iterable["Segment"]) -> tuple[ImageHeader, str | None]:
    """Return the header (0x0 pixels if there is no frame), and the name of the part that is missing at the end."""
    height = width = 0
    scanned = False
    for marker, _, body, _ in segments:
        if marker == EOI:
            return ImageHeader("jpeg", height, width), None if scanned else "image data"
        if marker in FRAMES:
            if marker not in HUFFMAN_FRAMES:
                raise InputError(f"a JPEG of the rare kind SOF{marker - 0xC0}, which cannot be verified; convert it")
            height, width = int.from_bytes(data[body + 3 : body + 5]), int.from_bytes(data[body + 5 : body + 7])
        scanned = scanned or marker == SOS
    return ImageHeader("jpeg", height, width), "end-of-image marker"


class Segment(NamedTuple):
    """One segment: the second byte of its marker, and the positions of its start, its length field and its end.

    The entropy-coded data of a scan lie between its segment and the next segment. Other segments are adjacent.
    """

    marker: int
    start: int
    body: int
    end: int


def jpeg_segments(data: bytes) -> Iterator[Segment]:
    """Yield the segments of a JPEG after its first marker, up to the end-of-image marker if there is one."""
    position = 0
    while (match := _MARKER.search(data, position)) is not None:
        marker, body = data[match.end() - 1], match.end()
        position = body if marker == EOI else body + int.from_bytes(data[body : body + 2])
        yield Segment(marker, match.start(), body, position)
        if marker == EOI:
            return


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
