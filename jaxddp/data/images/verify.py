"""Whether an image file is sound to its last pixel, which its markers alone cannot show."""

import dataclasses
import io
import struct
import zlib
from collections.abc import Sequence

from PIL import Image

from jaxddp.core.errors import InputError
from jaxddp.data.images.header import JPEG_START, Segment, essence, has_every_scan, parse_header, segments
from jaxddp.data.images.image_types import AGAIN, ImageHeader, Kind
from jaxddp.data.images.jpeg import FORGIVEN, bytes_left_over, check_holes
from jaxddp.data.images.pillow import check_pillow
from jaxddp.data.images.png import png_bytes_left_over


def verify(data: bytes) -> ImageHeader:
    """The header of a file all of whose image data is there and decodes, with the bytes that are left over behind it.

    A JPEG's entropy-coded data is read to its end, at an eighth of the size, gray: about half the work of decoding it.
    It must hold as many blocks as the frame has, and end with the last of them, up to `FORGIVEN` bytes. This detects a
    file that was cut short and closed with an end marker again, which a decoder fills up with gray; one that gained
    data; and a header that names another size. A PNG is decompressed, and its checksums compared. WebP, TIFF and BMP
    are decoded whole.

    A JPEG has no checksum, and nearly any bits decode, so a change that leaves as many blocks as before can be missed:
    that of a few bits or bytes, a header whose size means as many blocks, other tables of colors. Data that were cut
    off and not replaced are always detected, except for a few bytes of the rare JPEG whose sampling of the colors the
    strict decoder does not know.

    Raises:
        InputError: what `parse_header` refuses, and data that is damaged or does not end where the image does.
    """
    found = [*segments(data)] if data.startswith(JPEG_START) else []
    header = parse_header(data, found)
    try:
        left_over = _read_to_end(data, header.kind, found)
    except InputError:
        raise
    # The last three over what a damaged header says.
    except (ValueError, OSError, SyntaxError, zlib.error, LookupError, struct.error) as error:
        raise InputError(f"damaged: {error}; {AGAIN}") from None
    if left_over > FORGIVEN:
        raise InputError(
            f"damaged: {left_over:,} bytes are left over after its last pixel, so data were lost or gained, or its "
            f"header says another size; {AGAIN}"
        )
    return dataclasses.replace(header, left_over=left_over)


def _read_to_end(data: bytes, kind: Kind, found: Sequence[Segment]) -> int:
    """How many bytes are left over. Raises: ValueError or what a damaged header leads to; InputError."""
    if kind == "jpeg":
        return _read_jpeg(data, found)
    if kind == "png":
        return png_bytes_left_over(data)
    check_pillow(data, kind)
    return 0


def _read_jpeg(data: bytes, found: Sequence[Segment]) -> int:
    """How many bytes are left over. Raises: as `bytes_left_over`; InputError."""
    if not has_every_scan(data, found):
        raise InputError(f"cut short: the scans of its finer detail are missing; {AGAIN}")
    check_holes(data, found)
    # The decoder reports only its first complaint, and one about metadata would hide another about the image.
    return bytes_left_over(*essence(data, found))


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
        return Image.open(io.BytesIO(essence(data, found, adobe=True)[0]))
    except OSError:
        return Image.open(io.BytesIO(essence(data, found)[0]))
