"""Whether an image file is sound to its last pixel, which its markers alone cannot show."""

import hashlib
import io
import re
import struct
import zlib

import simplejpeg
from PIL import Image

from jaxddp.data.images.header import AGAIN, JPEG_END, ImageHeader, essence, has_every_scan, parse_header, segments
from jaxddp.errors import InputError

# Bytes after the last of the image data: some of ImageNet's files have them, and every pixel is there.
_PADDED = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
# A sampling of the colors that the strict decoder has no name for, such as that of Pillow's subsampled CMYK.
_UNKNOWN_SAMPLING = "Could not determine subsampling"
# The decoder may report fewer extraneous bytes than there are, by the few that it had already read.
_TRIES = 4


def verify(data: bytes) -> ImageHeader:
    """The header of a file all of whose image data is there and decodes.

    A JPEG's entropy-coded data is read to its end, at an eighth of the size, gray: about half the work of decoding it.
    This detects a file that was cut short and closed with an end marker again, which a decoder fills up with gray.
    A PNG is decoded, and its checksums compared.

    A JPEG has no checksum, so a change that leaves as many blocks as before can be missed: single bits, or a file's
    last bytes where the bytes that replace them happen to decode. Data that were cut off and not replaced are always
    detected, except for a few bytes of the rare JPEG that only `_read_any_sampling` can read.

    Raises:
        InputError: what `parse_header` refuses, and data that is damaged or ends before the image does.
    """
    header = parse_header(data)
    found = [*segments(data)] if header.kind == "jpeg" else []
    try:
        if header.kind == "jpeg":
            # The decoder reports only its first complaint, and one about metadata would hide another about the image.
            _read_jpeg(essence(data, found))
        else:
            _read_png(data)
    # Pillow raises SyntaxError for a chunk whose checksum is wrong, and the others over what a chunk says.
    except (ValueError, OSError, SyntaxError, LookupError, struct.error, zlib.error) as error:
        raise InputError(f"damaged: {error}; {AGAIN}") from None
    if not has_every_scan(data, found):
        raise InputError(f"cut short: the scans of its finer detail are missing; {AGAIN}")
    return header


def open_sound(data: bytes) -> Image.Image:
    """Opens what `verify` has found sound as a Pillow image, for work that is done once: describing and packing.

    Pillow refuses a JPEG over broken metadata on which no pixel depends, such as a color profile of no bytes. Decoders
    that train ignore it, so it is left out here; Adobe's marker, which says the color space, is left out only if it is
    broken itself.
    """
    try:
        return Image.open(io.BytesIO(data))
    except OSError:
        found = [*segments(data)]
    try:
        return Image.open(io.BytesIO(essence(data, found, adobe=True)))
    except OSError:
        return Image.open(io.BytesIO(essence(data, found)))


def _read_jpeg(data: bytes) -> None:
    """Decodes it strictly; raises ValueError with the decoder's first complaint."""
    for _ in range(_TRIES):
        try:
            simplejpeg.decode_jpeg(data, "gray", fastdct=True, min_height=1, min_width=1, min_factor=8)
            return
        except ValueError as error:
            if _UNKNOWN_SAMPLING in str(error):
                return _read_any_sampling(data)
            padded = _PADDED.search(str(error))
            if padded is None:
                raise
            data = data[: -len(JPEG_END) - int(padded[1])] + JPEG_END
    raise ValueError("bytes without meaning before the end marker")


def _read_any_sampling(data: bytes) -> None:
    """Decodes it with a tolerant decoder; raises ValueError where bits after its data make a difference.

    So data that end early are detected nearly always, and damage in the middle is not.
    """
    pixels = set()
    for behind in (b"\x00", b"\x55", b"\xaa", b"\xfe"):
        longer = data[: -len(JPEG_END)] + 64 * behind + JPEG_END
        with Image.open(io.BytesIO(longer), formats=["JPEG"]) as image:
            pixels.add(hashlib.sha256(image.tobytes()).digest())
    if len(pixels) > 1:
        raise ValueError("premature end of data segment")


def _read_png(data: bytes) -> None:
    """Decodes it; raises OSError, SyntaxError or ValueError. Decoding alone leaves the last checksums unread."""
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        image.load()
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        image.verify()
