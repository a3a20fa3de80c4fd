"""What the header of a JPEG or PNG file says before anything decodes it: kind, size, and whether the file is whole."""

from dataclasses import dataclass
from typing import Literal

from jaxddp.data.images.markers import EOI, FRAMES, SOS, number, segments
from jaxddp.errors import InputError

MAX_PIXELS = 100_000_000
"""The largest image that is decoded: a file of a few kilobytes can ask for gigabytes of memory."""

JPEG_START = b"\xff\xd8\xff"
JPEG_END = b"\xff\xd9"
PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"

AGAIN = "download it again or remove its row"


@dataclass(frozen=True)
class ImageHeader:
    """The kind of a file, by its content and not by its name, and the size of its image in pixels."""

    kind: Literal["jpeg", "png"]
    height: int
    width: int


def parse_header(data: bytes) -> ImageHeader:
    """The header of a whole JPEG or PNG file.

    A JPEG is whole when the end-of-image marker (ITU-T T.81, B.1.1.3) follows its last scan. Bytes after that marker
    are accepted, as every decoder does (cameras append data of their own); one inside an embedded thumbnail does not
    count. A PNG is whole when it holds its closing IEND chunk.

    Raises:
        InputError: empty, cut short, larger than `MAX_PIXELS`, or neither JPEG nor PNG.
    """
    if not data:
        raise InputError(f"empty file; {AGAIN}")
    if data.startswith(JPEG_START):
        header, end = _scan_jpeg(data)
    elif data.startswith(PNG_START):
        header = ImageHeader("png", height=number(data[20:24]), width=number(data[16:20]))
        end = None if PNG_END in data else "IEND chunk"
    else:
        found = "a GIF" if data.startswith(b"GIF8") else f"a file that starts with {data[:4]!r}"
        raise InputError(f"neither JPEG nor PNG but {found}; convert it or remove its row")
    if header.height * header.width > MAX_PIXELS:
        size = f"{header.width}x{header.height} pixels"
        raise InputError(f"{size}, more than the limit of {MAX_PIXELS:,}; shrink it or remove its row")
    if end is not None:
        raise InputError(f"cut short: no {end} at the end; {AGAIN}")
    return header


def _scan_jpeg(data: bytes) -> tuple[ImageHeader, str | None]:
    """What the markers say (T.81, B.1.1): the frame's size, 0x0 without a frame, and what is missing at the end."""
    height = width = 0
    scanned = False
    for marker, _, body, _ in segments(data):
        if marker == EOI:
            return ImageHeader("jpeg", height, width), None if scanned else "image data"
        if marker in FRAMES:
            height, width = number(data[body + 3 : body + 5]), number(data[body + 5 : body + 7])
        scanned = scanned or marker == SOS
    return ImageHeader("jpeg", height, width), "end-of-image marker"
