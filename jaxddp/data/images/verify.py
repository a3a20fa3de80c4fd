"""Verifies an image file to its last pixel, because a damaged file can have correct markers.

This module finds faults that no decoder reports. In a test, 180 progressive files were cut between two scans and closed
with an end marker: TurboJPEG in its strict mode and Pillow accepted all of them, and `_has_every_scan` rejected all.
These decoders cannot skip metadata, and an error in the metadata can hide an error in the image, so `joined` removes
the metadata.

libjpeg does not report how much of a scan it used: it reads up to 8 bytes ahead without a warning. But where it expects
a restart marker (ITU-T T.81, B.2.4.4), it reports the number of bytes that it skips. So this module adds a restart and
one more row of blocks to the frame. After the last block of the image, libjpeg then looks for a restart marker, finds
the end marker instead, and reports the number of bytes before it.
"""

import dataclasses
import io
import re
import struct
import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

import simplejpeg
from PIL import Image

from jaxddp.core.errors import InputError, first_line
from jaxddp.data.images.header import (
    APP0,
    APP14,
    COMMENT,
    DHT,
    DOWNLOAD_AGAIN,
    DRI,
    FRAMES,
    JPEG_END,
    JPEG_START,
    PNG_START,
    PROGRESSIVE,
    SOS,
    ImageHeader,
    Segment,
    check_pillow,
    jpeg_segments,
    parse_header,
)

_COEFFICIENTS = 64
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
METADATA = frozenset((*range(APP0, APP0 + 16), COMMENT))
"""The markers of segments on which no coefficient depends."""
_CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")


def sound_image(data: bytes) -> tuple[ImageHeader, bytes]:
    """Return the header of an image file, and the bytes to decode: `data` itself, or a copy without stray bytes.

    Raises: InputError with what is wrong with the file; see `verify`.
    """
    header = verify(data)
    return header, without_stray_bytes(data, header.left_over)


def verify(data: bytes) -> ImageHeader:
    """Return the header of an image file, with the number of bytes that follow its image data.

    The image data must be complete, and decode without an error.

    A JPEG's entropy-coded data are read to their end. The file is decoded to a gray image of an eighth of the size,
    which takes about half the work of a full decoding. The data must hold as many blocks as the frame has, and end at
    most `MAX_LEFT_OVER` bytes after the last block. This detects three faults: additional data, a header with another
    size, and a file that was cut short and closed with an end marker, whose missing part a decoder would fill
    with gray. Other kinds are decoded whole, and the
    checksums of a PNG are compared.

    A JPEG has no checksum, and nearly any bits decode. So a change can be missed if it keeps the number of blocks.
    Examples are a change of a few bits or bytes, changed color tables, and a header with another size that has the
    same number of blocks. Data that were cut off and not replaced are always detected, with one exception: a few
    missing bytes may not be detected if the strict decoder does not know the JPEG's color sampling, which is rare.

    Raises:
        InputError: `parse_header` rejects the file, or its data are damaged or do not end with the image.
    """
    segments = [*jpeg_segments(data)] if data.startswith(JPEG_START) else []
    header, left_over = parse_header(data, segments), 0
    try:
        if header.kind == "jpeg":
            if not _has_every_scan(data, segments):
                raise InputError(f"cut short: the scans of its finer detail are missing; {DOWNLOAD_AGAIN}")
            _check_holes(data, segments)
            # The decoder reports only its first error. An error in the metadata would hide an error in the image
            # data, so the metadata are removed.
            left_over = bytes_left_over(*joined(data, segments))
        elif header.kind == "png":
            _read_png(data)
        else:
            check_pillow(data, header.kind)
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


def _read_png(data: bytes) -> None:
    """Decode a PNG. Raises: ValueError, struct.error, zlib.error, or an error of Pillow."""
    with Image.open(io.BytesIO(_without_ancillary_chunks(data)), formats=["PNG"]) as image:
        # Pillow accepts a missing palette, which TensorFlow rejects, and missing rows of an interlaced image.
        if image.mode == "P" and image.palette is None:
            raise ValueError("no palette, though its pixels are indices of one")
        image.load()
        most_bytes = 20 * image.width * image.height
    stream = zlib.decompressobj()
    stream.decompress(b"".join(chunk[8:-4] for chunk in _chunks(data) if chunk[4:8] == b"IDAT"), most_bytes)
    if not stream.eof:
        raise ValueError("image data end too early or too late")


def open_sound(data: bytes) -> Image.Image:
    """Open an image file with Pillow, to describe or pack it. `verify` must accept the file.

    Pillow rejects some metadata on which no pixel depends, such as an empty or very large color profile. This function
    then removes the metadata, because the decoders of training ignore metadata. Adobe's marker, which holds the color
    space of a JPEG, is removed only if it is broken itself.

    Raises: InputError if Pillow rejects the file without metadata too.
    """
    contents = [data]
    if data.startswith(JPEG_START):
        segments = [*jpeg_segments(data)]
        contents += [joined(data, segments, without)[0] for without in (METADATA - {APP14}, METADATA)]
    elif data.startswith(PNG_START):
        contents.append(_without_ancillary_chunks(data))
    reason = ""
    for content in contents:
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


def _check_holes(data: bytes, segments: Sequence[Segment]) -> None:
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
    pixels = _pixels_before_any_end(data)
    if len(pixels) != 1:
        raise ValueError("premature end of data segment")
    cuts = range(1, MAX_LEFT_OVER + 2)
    return next((cut - 1 for cut in cuts if _pixels_before_any_end(data[:-cut]) != pixels), MAX_LEFT_OVER + 1)


def _pixels_before_any_end(data: bytes) -> set[bytes]:
    """Return the different results of decoding data that different bytes follow."""
    pixels, scan = set(), data.rstrip(b"\xff")
    for end in (b"\x00", b"\x55", b"\xaa", b"\xfe"):
        # The file may fail to decode once bytes that the image needs are replaced.
        with suppress(OSError), Image.open(io.BytesIO(scan + 64 * end + JPEG_END), formats=["JPEG"]) as image:
            pixels.add(image.tobytes())
    return pixels


def _without_ancillary_chunks(data: bytes) -> bytes:
    """Return a PNG with its critical chunks only, on which its colors depend (PNG specification, 5.4)."""
    return PNG_START + b"".join(chunk for chunk in _chunks(data) if chunk[4:8] in _CRITICAL)


def _chunks(data: bytes) -> Iterator[bytes]:
    """Yield the chunks of a PNG. Raises: ValueError or struct.error if one is cut short or its checksum is wrong."""
    position, kind = len(PNG_START), b""
    while kind != b"IEND":
        size, kind = struct.unpack_from(">I4s", data, position)
        chunk = data[position : position + size + 12]
        if not kind.isalpha() or chunk[-4:] != struct.pack(">I", zlib.crc32(chunk[4:-4])):
            raise ValueError(f"a wrong checksum in the chunk {kind!r} at byte {position:,}")
        yield chunk
        position += size + 12


def joined(data: bytes, segments: Sequence[Segment], without: Container[int] = METADATA) -> tuple[bytes, list[Segment]]:
    """Return a JPEG and its segments, without bytes that belong to no segment, and without segments of some markers.

    No coefficient depends on the removed bytes. Adobe's marker holds the color space.
    """
    view = memoryview(data)
    parts, new_segments, start = [view[:2]], [], 2
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        if segment.marker in without:
            continue
        end = following.start if following and segment.marker == SOS else segment.end
        parts.append(view[segment.start : end])
        new_segments.append(Segment(segment.marker, start, start + 2, start + segment.end - segment.start))
        start += len(parts[-1])
    return b"".join(parts), new_segments


def _has_every_scan(data: bytes, segments: Iterable[Segment]) -> bool:
    """Return whether the scans contain every coefficient of every component to its last bit (T.81, G.1.1.1).

    A progressive file that was cut between two scans and closed with an end marker decodes without an error, to a
    coarse image. A file with one scan for each component also decodes without an error if its last scans are missing.
    """
    bits_left: dict[int, list[int | None]] = {}
    progressive = False
    for marker, _, body, end in segments:
        if marker in FRAMES:
            progressive = marker in PROGRESSIVE
            unsent = [None] * (_COEFFICIENTS if progressive else 1)
            bits_left |= {component: [*unsent] for component in data[body + 8 : end : 3]}
        elif marker == SOS:
            first, last, low = (data[end - 3], data[end - 2], data[end - 1] & 15) if progressive else (0, 0, 0)
            for component in data[body + 3 : end - 3 : 2]:
                bits = bits_left.get(component, [])
                bits[first : last + 1] = [low] * len(bits[first : last + 1])
    return all(not any(bit != 0 for bit in bits) for bits in bits_left.values())


def without_stray_bytes(data: bytes, left_over: int) -> bytes:
    """Return the image without stray bytes between segments and after the last block; `data` itself if there are none.

    Decoders skip stray bytes, and libjpeg reports them on stderr without the name of a file.

    Args:
        data: a file that `verify` accepts.
        left_over: the number of bytes after the last block, from `verify`.
    """
    segments = [*jpeg_segments(data)] if data.startswith(JPEG_START) else []
    if not left_over and not any(gap.strip(b"\xff") for gap in _gaps(data, segments)):
        return data
    content = joined(data, segments, ())[0].removesuffix(JPEG_END).rstrip(b"\xff")
    return content[: len(content) - left_over] + JPEG_END


def stray_bytes(data: bytes) -> list[str]:
    """Return notes on the bytes of a JPEG that belong to no segment."""
    segments = [*jpeg_segments(data)]
    # Fill bytes may precede a marker.
    gaps = [len(gap.rstrip(b"\xff")) for gap in _gaps(data, segments)]
    notes = [f"extraneous bytes: {gap} before a marker" for gap in gaps if gap]
    return notes + [f"bytes after the end: {behind}" for behind in [len(data) - segments[-1].end] if behind]


def _gaps(data: bytes, segments: Sequence[Segment]) -> Iterator[bytes]:
    """Yield the bytes before each segment that belong to no segment and to no scan."""
    for before, segment in pairwise([Segment(0, 0, 0, 2), *segments]):
        if before.marker != SOS:
            yield data[before.end : segment.start]
