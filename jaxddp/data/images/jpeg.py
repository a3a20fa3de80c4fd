"""Reads the image data of a JPEG to the last byte: whether all blocks exist, and how many bytes are left over.

libjpeg does not report how much of a scan it used: it reads up to 8 bytes ahead without a warning. But where it expects
a restart marker (ITU-T T.81, B.2.4.4), it reports the number of bytes that it skips. So this module adds a restart and
one more row of blocks to the frame. After the last block of the image, libjpeg then looks for a restart marker, finds
the end marker instead, and reports the number of bytes before it.
"""

import hashlib
import io
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import simplejpeg
from PIL import Image

from jaxddp.data.images.header import DHT, DRI, FRAMES, JPEG_END, PROGRESSIVE, SOS, Segment, jpeg_segments

MAX_LEFT_OVER = 7
"""The largest number of bytes that may be left over after the last block.

An encoder that writes words of 8 bytes may leave 7 bytes.

None of 60,200 real files has bytes left over. If the height in the header is reduced by one row of blocks, each of
these files has 10 or more bytes left over.
"""

_PADDING = bytes(16)

_HOLE = bytes(16)
"""Zeros that mark a stretch of lost data. In 60,200 real files, at most 4 zero bytes follow each other."""

_NO_RESTART = re.compile(r"found marker 0xd9 instead of RST")
_LEFT_OVER = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
_ENDS_EARLY = re.compile("premature end", re.IGNORECASE)
# The message for a color sampling that the strict decoder does not know, such as Pillow's subsampled CMYK.
_UNKNOWN_SAMPLING = "Could not determine subsampling"
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")

_UINT16_MAX = 0xFFFF
"""The largest number in a field of 2 bytes: the blocks between two restarts, or the rows of pixels."""


def bytes_left_over(data: bytes, segments: Sequence[Segment]) -> int:
    """Return the number of bytes between the last block and the end of a JPEG without metadata.

    Above `MAX_LEFT_OVER`, the number is a lower bound.

    Raises: ValueError or an error of Pillow, with the decoder's first message, if the data are damaged or end before
        the image does.
    """
    # Remove fill bytes (0xFF) before the end marker: without the marker, they would be read as data.
    end = len(data) - len(JPEG_END)
    while data[end - 1] == JPEG_END[0]:
        end -= 1
    if _RESTART.fullmatch(data, end - 2, end):
        return 2 + bytes_left_over(shorter := data[: end - 2] + JPEG_END, [*jpeg_segments(shorter)])
    extended = _add_row_of_blocks(data, segments, end)
    data = data[:end]
    try:
        return _count_by_cutting(data) if extended is None else _count_by_extending(extended)
    except ValueError as error:
        if _UNKNOWN_SAMPLING in str(error):
            return _count_by_altering(data)
        raise


def check_holes(data: bytes, segments: Sequence[Segment]) -> None:
    """Check that zeros do not replace data of a scan, as in a block of a disk that was never written.

    Zeros decode as a sequence of the shortest code. An encoder writes many of these codes only if the shortest code
    stands for an empty block. Scans that refine coefficients hold plain bits, which may be zeros.

    Raises: ValueError if there are such zeros.
    """
    if _HOLE not in data:
        return
    progressive = any(segment.marker in PROGRESSIVE for segment in segments)
    first_symbols: dict[int, int] = {}
    for segment, following in pairwise(segments):
        position = segment.body + 2
        while segment.marker == DHT and position < segment.end:
            first_symbols[data[position]] = data[position + 17]
            position += 17 + sum(data[position + 1 : position + 17])
        if segment.marker != SOS or not segment.end <= data.find(_HOLE, segment.end) < following.start:
            continue
        tables = data[segment.body + 4 : segment.end - 3 : 2]
        first_coefficient, refines = data[segment.end - 3], data[segment.end - 1] >> 4
        if progressive and first_coefficient == 0:
            codes = [first_symbols.get(table >> 4, 0) for table in tables]
        else:
            # The low 4 bits of a symbol are the size of the coefficient; blocks end with a symbol of size 0.
            codes = [first_symbols.get(0x10 | table & 15, 0) & 15 for table in tables]
        if any(codes) and not (progressive and refines):
            raise ValueError("zeros in place of image data")


def _decode(data: bytes) -> None:
    """Decode strictly, at an eighth of the size, in gray. Raises: ValueError with the decoder's first message."""
    simplejpeg.decode_jpeg(data, "gray", fastdct=True, min_height=1, min_width=1, min_factor=8)


def _add_row_of_blocks(data: bytes, segments: Sequence[Segment], end: int) -> bytes | None:
    """Return the file up to `end`, with a restart and one more row of blocks, and zeros in place of that row's data.

    Returns None if no restart can be added, because the file has several scans or its last restart interval does not
    end with the image.
    """
    frames = [segment for segment in segments if segment.marker in FRAMES]
    scans = [segment for segment in segments if segment.marker == SOS]
    if len(frames) != 1 or len(scans) != 1 or frames[0].marker in PROGRESSIVE:
        return None
    frame, scan = frames[0].body, scans[0]
    components = data[frame + 7]
    if data[scan.body + 2] != components:
        return None
    # A block of one component alone is 8 x 8, whatever its sampling (T.81, A.2.2).
    samplings = data[frame + 9 : frame + 8 + 3 * components : 3] if components > 1 else b"\x11"
    block_height, block_width = 8 * max(one & 15 for one in samplings), 8 * max(one >> 4 for one in samplings)
    if not block_height or not block_width:
        return None
    height, width = int.from_bytes(data[frame + 3 : frame + 5]), int.from_bytes(data[frame + 5 : frame + 7])
    rows, columns = -(-height // block_height), -(-width // block_width)
    restarts = [int.from_bytes(data[one.body + 2 : one.end]) for one in segments if one.marker == DRI]
    interval = (restarts[-1] if restarts else 0) or rows * columns
    taller = rows * block_height + 1
    if max(interval, taller) > _UINT16_MAX or rows * columns % interval:
        return None
    # The decoder counts restarts modulo 8, and would accept data that end 8 restarts early.
    if restarts and len(_RESTART.findall(data, scan.end)) != rows * columns // interval - 1:
        return None
    restart = b"\xff\xdd\x00\x04" + interval.to_bytes(2)
    header = data[: frame + 3], taller.to_bytes(2), data[frame + 5 : scan.start], restart
    # Use a view: a copy of a photograph would add a tenth to the time of its verification.
    return b"".join((*header, memoryview(data)[scan.start : end], _PADDING, JPEG_END))


def _count_by_extending(extended: bytes) -> int:
    """Return the number of bytes left over, which the decoder skips where it expects the last restart."""
    try:
        _decode(extended)
    except ValueError as error:
        reported = _LEFT_OVER.search(str(error))
        if reported is None and not _NO_RESTART.search(str(error)):
            raise
        left = int(reported[1]) - len(_PADDING) if reported else -1
        if left >= 0:
            return left
    raise ValueError("premature end of data segment")


def _count_by_cutting(data: bytes) -> int:
    """Return the number of bytes left over in a file without end marker: remove bytes until one is missing."""
    cut = 0
    while cut <= MAX_LEFT_OVER + 1:
        try:
            _decode(data[: len(data) - cut] + JPEG_END)
            cut += 1
        except ValueError as error:
            if cut and _ENDS_EARLY.search(str(error)):
                break
            if (reported := _LEFT_OVER.search(str(error))) is None:
                raise
            cut += int(reported[1])
            if cut > MAX_LEFT_OVER:
                return cut
    return cut - 1


def _count_by_altering(data: bytes) -> int:
    """Return the number of last bytes that no pixel depends on, found with a tolerant decoder.

    This nearly always detects data that end early, and bytes that are left over because of damage in the middle.

    Raises: ValueError if bytes after the data change a pixel.
    """
    expected = {_pixels(variant) for variant in _make_end_variants(data)}
    if len(expected) > 1:
        raise ValueError("premature end of data segment")
    cut = 1
    # The file may fail to decode once bytes that the image needs are replaced.
    with suppress(OSError):
        while (
            cut <= MAX_LEFT_OVER + 1 and {_pixels(variant) for variant in _make_end_variants(data[:-cut])} == expected
        ):
            cut += 1
    return cut - 1


def _make_end_variants(scan: bytes) -> list[bytes]:
    scan = scan.rstrip(b"\xff")
    return [scan + 64 * end + JPEG_END for end in (b"\x00", b"\x55", b"\xaa", b"\xfe")]


def _pixels(data: bytes) -> bytes:
    with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        return hashlib.sha256(image.tobytes()).digest()
