"""Verifies an image file to its last pixel, because a damaged file can have correct markers."""

import dataclasses
import io
import struct
import zlib
from collections.abc import Iterator, Sequence

from PIL import Image

from jaxddp.core.errors import InputError
from jaxddp.core.wording import first_line
from jaxddp.data.images.header import (
    JPEG_START,
    PNG_START,
    Segment,
    has_every_scan,
    jpeg_segments,
    parse_header,
    strip_metadata,
)
from jaxddp.data.images.image_types import DOWNLOAD_AGAIN, ImageHeader, Kind
from jaxddp.data.images.jpeg import MAX_LEFT_OVER, bytes_left_over, check_holes
from jaxddp.data.images.pillow import check_pillow
from jaxddp.data.images.png import png_bytes_left_over, without_ancillary_chunks


def verify(data: bytes) -> ImageHeader:
    """Return the header of an image file, with the number of bytes that follow its image data.

    The image data must be complete, and decode without an error.

    A JPEG's entropy-coded data are read to their end. The file is decoded to a gray image of an eighth of the size,
    which takes about half the work of a full decoding. The data must hold as many blocks as the frame has, and end at
    most `MAX_LEFT_OVER` bytes after the last block. This detects three faults: additional data, a header with another
    size, and a file that was cut short and closed with an end marker, whose missing part a decoder would fill
    with gray. A PNG is decompressed, and its checksums are compared. Other kinds are decoded whole.

    A JPEG has no checksum, and nearly any bits decode. So a change can be missed if it keeps the number of blocks.
    Examples are a change of a few bits or bytes, changed color tables, and a header with another size that has the
    same number of blocks. Data that were cut off and not replaced are always detected, with one exception: a few
    missing bytes may not be detected if the strict decoder does not know the JPEG's color sampling, which is rare.

    Raises:
        InputError: `parse_header` rejects the file, or its data are damaged or do not end with the image.
    """
    segments = [*jpeg_segments(data)] if data.startswith(JPEG_START) else []
    header = parse_header(data, segments)
    try:
        left_over = _read_to_end(data, header.kind, segments)
    except InputError:
        raise
    # A damaged header can cause the last three of these errors.
    except (ValueError, OSError, SyntaxError, zlib.error, LookupError, struct.error) as error:
        raise InputError(f"damaged: {error}; {DOWNLOAD_AGAIN}") from None
    if left_over > MAX_LEFT_OVER:
        raise InputError(
            f"damaged: {left_over:,} bytes are left over after its last pixel, so data were lost or gained, or its "
            f"header says another size; {DOWNLOAD_AGAIN}"
        )
    return dataclasses.replace(header, left_over=left_over)


def _read_to_end(data: bytes, kind: Kind, segments: Sequence[Segment]) -> int:
    """Return the number of bytes left over. Raises: InputError, or the errors that `verify` catches."""
    if kind == "jpeg":
        return _read_jpeg(data, segments)
    if kind == "png":
        return png_bytes_left_over(data)
    check_pillow(data, kind)
    return 0


def _read_jpeg(data: bytes, segments: Sequence[Segment]) -> int:
    """Return the number of bytes left over. Raises: InputError, ValueError, or an error of Pillow."""
    if not has_every_scan(data, segments):
        raise InputError(f"cut short: the scans of its finer detail are missing; {DOWNLOAD_AGAIN}")
    check_holes(data, segments)
    # The decoder reports only its first error. An error in the metadata would hide an error in the image data, so
    # the metadata are removed.
    return bytes_left_over(*strip_metadata(data, segments))


def open_sound(data: bytes) -> Image.Image:
    """Open an image file with Pillow, to describe or pack it. `verify` must accept the file.

    Pillow rejects some metadata on which no pixel depends, such as an empty or very large color profile. This function
    then removes the metadata, because the decoders of training ignore metadata. Adobe's marker, which holds the color
    space of a JPEG, is removed only if it is broken itself.

    Raises: InputError if Pillow rejects the file without metadata too.
    """
    reason = ""
    for content in _with_less_metadata(data):
        try:
            image = Image.open(io.BytesIO(content))
            # Chunks of metadata may follow the pixels.
            if image.format == "PNG":
                image.load()
        # Metadata can cause any error.
        except Exception as error:
            reason = first_line(error)
        else:
            return image
    raise InputError(f"Pillow cannot open it ({reason}); convert it or leave it out")


def _with_less_metadata(data: bytes) -> Iterator[bytes]:
    """Yield a file, and then the file with less and less metadata."""
    yield data
    if data.startswith(JPEG_START):
        segments = [*jpeg_segments(data)]
        yield strip_metadata(data, segments, adobe=True)[0]
        yield strip_metadata(data, segments)[0]
    elif data.startswith(PNG_START):
        yield without_ancillary_chunks(data)
