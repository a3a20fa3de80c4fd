"""Image files: their headers, their pixels, and whether they are sound to their last pixel.

Nothing of a header of a JPEG (ITU-T T.81, B.1.1) or PNG is decoded. Finding the segments of a JPEG of 53 kB takes 28
microseconds; Pillow takes 20 to read the header alone. Other kinds are read with Pillow.

`verify` finds faults that no decoder reports. In a test, 180 progressive files were cut between two scans and closed
with an end marker: TurboJPEG in its strict mode and Pillow accepted all of them, and `_has_every_scan` rejected all.
These decoders cannot skip metadata, and an error in the metadata can hide an error in the image, so `joined` removes
the metadata.

libjpeg does not report how much of a scan it used: it reads up to 8 bytes ahead without a warning. But where it expects
a restart marker (ITU-T T.81, B.2.4.4), it reports the number of bytes that it skips. So this module adds a restart and
one more row of blocks to the frame. After the last block of the image, libjpeg then looks for a restart marker, finds
the end marker instead, and reports the number of bytes before it.
"""

import ctypes
import dataclasses
import io
import re
import struct
import threading
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image, features

from jaxddp.core.errors import InputError, Key, first_line

MAX_PIXELS = 100_000_000
"""The largest number of pixels of an image. Without a limit, a file of a few kilobytes could need gigabytes."""

DOWNLOAD_AGAIN = "download it again or leave it out"
"""The advice for a damaged file."""

Kind = Literal["jpeg", "png", "webp", "tiff", "bmp", "ppm", "gif", "avif", "heif"]
"""The kinds of files; "ppm" is also PGM and PBM, and "heif" is HEIC."""
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
_STARTS: tuple[tuple[bytes, Kind], ...] = (
    (JPEG_START, "jpeg"),
    (PNG_START, "png"),
    (rb"RIFF....WEBP", "webp"),
    (rb"II[*+]\0|MM\0[*+]", "tiff"),
    (rb"BM", "bmp"),
    (rb"P[1-6][ \t\r\n#]", "ppm"),
    (rb"GIF8", "gif"),
    (rb"....ftyp(?:....)*?avi[fs]", "avif"),
    (rb"....ftyp(?:hei|hev|mif1|msf1)", "heif"),
)
_MODES = frozenset(("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"))
_GRAY16 = frozenset(("I;16", "I;16B", "I;16L"))
_DEPTHS = {1, 2, 4, 8, 16}
# Tags of TIFF 6.0, section 8.
_BITS_PER_SAMPLE, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
_libtiff_errors = threading.local()
"""`lines` holds libtiff's errors in the file that the current thread reads. Pillow does not report all of them."""
MAX_LEFT_OVER = 7
"""The largest number of bytes that may be left over after the last block.

An encoder that writes words of 8 bytes may leave 7. None of 60,200 real files has any; with a row of blocks less in the
header, each has 10 or more.
"""
_PADDING = bytes(16)
_HOLE = bytes(16)
"""Zeros that mark a stretch of lost data. In 60,200 real files, at most 4 zero bytes follow each other."""
_LEFT_OVER = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
_ENDS_EARLY = re.compile("premature end", re.IGNORECASE)
_UNKNOWN_SAMPLING = "Could not determine subsampling"  # such as Pillow's subsampled CMYK
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
Decode = Callable[[bytes], object]
"""A decoder of a JPEG. It raises a ValueError with the first message of libjpeg."""
METADATA = frozenset((*range(APP0, APP0 + 16), COMMENT))
"""The markers of segments on which no coefficient depends."""
_CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")


@dataclasses.dataclass(frozen=True)
class ImageHeader:
    """The kind of a file, read from its content and not its name, and the size of its image in pixels."""

    kind: Kind
    height: int
    width: int
    left_over: int = dataclasses.field(default=0, compare=False)
    """The number of bytes after the image data on which no pixel depends; `verify` counts them."""
    has_stray_bytes: bool = dataclasses.field(default=False, compare=False)
    """Whether there are any, or bytes between segments."""
    bits: int = dataclasses.field(default=8, compare=False)
    """The bits of a value: 1, 2, 4, 8 or 16 in a PNG; in other kinds 16, or 8 if the values have 8 bits or fewer."""


def parse_header(data: bytes, segments: Sequence["Segment"] | None = None) -> ImageHeader:
    """Return the header of a complete JPEG or PNG file, or of a file that Pillow decodes.

    A JPEG is complete if the end-of-image marker (ITU-T T.81, B.1.1.3) follows its last scan. Bytes after that marker
    are accepted, as by every decoder (cameras append their own data). A marker inside an embedded thumbnail does not
    count. A PNG is complete if it holds its closing IEND chunk. Only `verify` reads the other kinds to their end.

    Args:
        segments: the segments of a JPEG, if they are already known.

    Raises:
        InputError: the file is empty or cut short, has no pixels or more than `MAX_PIXELS`, holds several images, is a
            JPEG without Huffman codes, or is of a kind that cannot be read. Of a GIF, the first image is used.
    """
    if not data:
        raise InputError(f"empty file; {DOWNLOAD_AGAIN}")
    kind: Kind | None = next((each for start, each in _STARTS if re.match(start, data[:40], re.DOTALL)), None)
    if kind is None:
        kinds = "JPEG, PNG, WebP, TIFF, BMP, PPM, GIF, AVIF or HEIC"
        raise InputError(f"not a {kinds} but a file that starts with {data[:4]!r}; convert it or leave it out")
    missing = None
    if kind == "jpeg":
        segments = [*jpeg_segments(data)] if segments is None else segments
        frames = [segment for segment in segments if segment.marker in FRAMES]
        if rare := [segment.marker - 0xC0 for segment in frames if segment.marker not in HUFFMAN_FRAMES]:
            raise InputError(f"a JPEG of the rare kind SOF{rare[0]}, which cannot be verified; convert it")
        body = frames[-1].body if frames else len(data)
        header = ImageHeader(kind, int.from_bytes(data[body + 3 : body + 5]), int.from_bytes(data[body + 5 : body + 7]))
        wanted, markers = {EOI: "end-of-image marker", SOS: "image data"}, {one.marker for one in segments}
        missing = next((name for marker, name in wanted.items() if marker not in markers), None)
    elif kind == "png":
        # The bit depth follows width and height. If it is damaged, 8 is used.
        bits = data[24] if len(data) > 24 and data[24] in _DEPTHS else 8
        header = ImageHeader(kind, int.from_bytes(data[20:24]), int.from_bytes(data[16:20]), bits=bits)
        missing = None if PNG_END in data else "IEND chunk"
    else:
        with _open_image(data, kind) as image:
            header = ImageHeader(kind, image.height, image.width, bits=_checked_bits(image))
    if header.height * header.width > MAX_PIXELS:
        size = f"{header.width}x{header.height} pixels"
        raise InputError(f"{size}, more than the limit of {MAX_PIXELS:,}; shrink it or leave it out")
    if missing is not None:
        raise InputError(f"cut short: no {missing} at the end; {DOWNLOAD_AGAIN}")
    if not header.height or not header.width:
        raise InputError(f"damaged: its header says {header.width}x{header.height} pixels; {DOWNLOAD_AGAIN}")
    return header


class Segment(NamedTuple):
    """One segment: the second byte of its marker, and the positions of its start, its length field and its end.

    The entropy-coded data of a scan lie between its segment and the next segment. Other segments are adjacent.
    """

    marker: int
    start: int
    body: int
    end: int


def jpeg_segments(data: bytes) -> Iterator[Segment]:
    """Yield the segments of a JPEG after its first marker, up to the end-of-image marker; none for other files."""
    position = 0 if data.startswith(JPEG_START) else len(data)
    while (match := _MARKER.search(data, position)) is not None:
        marker, body = data[match.end() - 1], match.end()
        position = body if marker == EOI else body + int.from_bytes(data[body : body + 2])
        yield Segment(marker, match.start(), body, position)
        if marker == EOI:
            return


def decode_pillow(data: bytes, kind: Kind, channels: int, bits: int) -> np.ndarray:
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
            fault = f"a {kind.upper()} with colors of 16 bits, of which only the upper 8 can be read"
            raise InputError(fault, advice=("save it as PNG, or set ", Key("data.bits"), " 8"))
        pixels = np.asarray(image if image.mode == "RGB" and channels == 3 else image.convert("RGBA"))[..., :channels]
        # 257 is 65535 / 255.
        return pixels if bits == 8 else pixels * np.uint16(257)


def _checked_bits(image: Image.Image) -> int:
    """Return the number of bits per value, at least 8.

    Raises: InputError if there are several images or unsupported values.
    """
    frames = 1 if image.format == "GIF" else getattr(image, "n_frames", 1)
    if frames > 1:
        raise InputError(f"holds {frames} images; keep one image per file")
    if image.format == "PPM":
        # Pillow's mode of gray with 16 bits is "I". For other values, the decoder has the largest value as an argument.
        arguments = image.tile[0][3]  # pyright: ignore[reportAttributeAccessIssue]: only an `ImageFile` has it
        return 16 if image.mode == "I" or (isinstance(arguments, tuple) and arguments[1] > 255) else 8
    tags = getattr(image, "tag_v2", {})
    depths = {*tags.get(_BITS_PER_SAMPLE, (8,))}
    inverted = image.mode in _GRAY16 and tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
    if image.mode not in _MODES | _GRAY16 or not depths <= _DEPTHS or inverted:
        description = "16 bits with white as 0" if inverted else f"mode {image.mode} with {max(depths)} bits"
        raise InputError(f"pixels of {description}, which are not supported; convert it to 8 or 16 bits, gray or RGB")
    return max(8, *depths)


def check_readable(kind: Kind, name: str = "the file") -> None:
    """Raises: InputError if Pillow needs another library for a kind of files."""
    if kind == "heif" and "HEIF" not in Image.OPEN:
        try:
            import pillow_heif  # pyright: ignore[reportMissingImports]

            pillow_heif.register_heif_opener()
        except ImportError:
            raise InputError(f"{name}: Pillow reads HEIC with pillow-heif; pip install it, or convert it") from None
    if kind == "avif" and not features.check("avif"):
        raise InputError(f"{name}: this Pillow reads no AVIF; pip install --upgrade Pillow, or convert the file")


@contextmanager
def _open_image(data: bytes, kind: Kind) -> Iterator[Image.Image]:
    """Open a Pillow image, and turn any error of Pillow in the block into an `InputError`."""
    errors = _libtiff_errors.lines = list[str]()
    check_readable(kind)
    try:
        with Image.open(io.BytesIO(data), formats=(kind.upper(),)) as image:
            yield image
        if errors:
            raise ValueError
    except InputError:
        raise
    except Image.DecompressionBombError:
        raise InputError(f"more pixels than the limit of {MAX_PIXELS:,}; shrink it or leave it out") from None
    except Image.UnidentifiedImageError:
        raise InputError(f"damaged: no header of a {kind.upper()} file; {DOWNLOAD_AGAIN}") from None
    # A damaged header can cause any error.
    except Exception as error:
        reason = next(iter(errors), None) or error or type(error).__name__
        raise InputError(f"damaged: {reason}; {DOWNLOAD_AGAIN}") from None


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
def _store_error(module: bytes | None, format_string: bytes | None, values: int | None) -> None:
    # The C type of the values differs between machines, and Pillow calls every file tempfile.tif: both are left out.
    where = b"" if module is None or b"." in module else module
    words = [b"libtiff", where, (format_string or b"").partition(b"%")[0].strip()]
    getattr(_libtiff_errors, "lines", []).append(": ".join(word.decode(errors="replace") for word in words if word))


# libtiff passes its errors to `_store_error`. By default it writes them to stderr without a file name. The symbols of a
# linked library are found through the extension module.
with suppress(OSError, AttributeError):
    _library = ctypes.CDLL(Image.core.__file__)
    _library.TIFFSetErrorHandler(_store_error)
    _library.TIFFSetWarningHandler(None)


def sound_image(data: bytes, decode: Decode | None = None) -> tuple[ImageHeader, bytes]:
    """Return the header of an image file, and the bytes to decode: `data` itself, or a copy without stray bytes.

    Decoders skip stray bytes between segments or after the last block, and some report them. Raises: see `verify`.
    """
    header = verify(data, decode)
    if not header.has_stray_bytes:
        return header, data
    content = joined(data, ()).removesuffix(JPEG_END).rstrip(b"\xff")
    return header, content[: len(content) - header.left_over] + JPEG_END


def verify(data: bytes, decode: Decode | None = None) -> ImageHeader:
    """Return the header of an image file, with the number of bytes that follow its image data.

    The image data must be complete, and decode without an error.

    A JPEG's entropy-coded data are read to their end. The data must hold as many blocks as the frame has, and end at
    most `MAX_LEFT_OVER` bytes after the last block. This detects additional data, a header with another size, and a
    file that was cut short and closed with an end marker, whose missing part a decoder would fill with gray. Other
    kinds are decoded whole, and the checksums of a PNG are compared.

    A JPEG has no checksum, and nearly any bits decode. So a change can be missed if it keeps the number of blocks.
    Examples are a change of a few bits or bytes, changed color tables, and a header with another size that has the
    same number of blocks. Data that were cut off and not replaced are always detected, with one exception: a few
    missing bytes may not be detected if the strict decoder does not know the JPEG's color sampling, which is rare.

    Args:
        decode: a strict decoder for most JPEG files, which gets the file without metadata and with more rows. By
            default, the image is decoded in gray, at an eighth of its size, which takes half the time.

    Raises: InputError if `parse_header` rejects the file, or its data are damaged or do not end with the image.
    """
    segments = [*jpeg_segments(data)]
    header, left_over = parse_header(data, segments), 0
    try:
        if header.kind == "jpeg":
            if not _has_every_scan(data, segments):
                raise InputError(f"cut short: the scans of its finer detail are missing; {DOWNLOAD_AGAIN}")
            _check_holes(data, segments)
            # The decoder reports only its first error. An error in the metadata would hide an error in the image
            # data, so the metadata are removed.
            left_over = bytes_left_over(joined(data, segments=segments), decode)
        elif header.kind == "png":
            _read_png(data)
        else:
            with _open_image(data, header.kind) as image:
                image.load()
    except InputError:
        raise
    # A damaged header can cause any error.
    except Exception as error:
        raise InputError(f"damaged: {error}; {DOWNLOAD_AGAIN}") from None
    if left_over > MAX_LEFT_OVER:
        fault = f"{left_over:,} bytes are left over after its last pixel, so data were lost or gained, or its header"
        raise InputError(f"damaged: {fault} says another size; {DOWNLOAD_AGAIN}")
    has_stray_bytes = left_over > 0 or any(gap.strip(b"\xff") for gap in _gaps(data, segments))
    return dataclasses.replace(header, left_over=left_over, has_stray_bytes=has_stray_bytes)


def _read_png(data: bytes) -> None:
    """Decode a PNG. Raises: InputError, ValueError, struct.error or zlib.error."""
    with _open_image(without_ancillary_chunks(data), "png") as image:
        # Pillow accepts a missing palette and missing rows.
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
        contents += [joined(data, without) for without in (METADATA - {APP14}, METADATA)]
    elif data.startswith(PNG_START):
        contents.append(without_ancillary_chunks(data))
    reason = ""
    for content in contents:
        try:
            image = Image.open(io.BytesIO(content))
            # Chunks of metadata may follow the pixels.
            if image.format == "PNG":
                image.load()
            return image
        # Metadata can cause any error.
        except Exception as error:
            reason = first_line(error)
    raise InputError(f"Pillow cannot open it ({reason}); convert it or leave it out")


def bytes_left_over(data: bytes, decode: Decode | None = None) -> int:
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
        return 2 + bytes_left_over(data[: end - 2] + JPEG_END, decode)
    extended = _add_row_of_blocks(data, end)
    data = data[:end]
    try:
        return _count_by_cutting(data) if extended is None else _count_by_extending(extended, decode or _decode)
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


def _add_row_of_blocks(data: bytes, end: int) -> bytes | None:
    """Return the file up to `end`, with a restart and one more row of blocks, and zeros in place of that row's data.

    Returns None if no restart can be added, because the file has several scans or its last restart interval does not
    end with the image.
    """
    segments = list[Segment]()
    for segment in jpeg_segments(data):
        segments.append(segment)
        if segment.marker == SOS:
            break
    frames, scan = [segment for segment in segments if segment.marker in FRAMES], segments[-1]
    if len(frames) != 1 or frames[0].marker in PROGRESSIVE:
        return None
    frame = frames[0].body
    components = data[frame + 7]
    # A sequential image has one scan if the first has all components.
    if data[scan.body + 2] != components:
        return None
    # A block of one component alone is 8 x 8, whatever its sampling (T.81, A.2.2). The decoder rejects a factor 0.
    samplings = data[frame + 9 : frame + 8 + 3 * components : 3] if components > 1 else b"\x11"
    block_height = 8 * (max((one & 15 for one in samplings), default=0) or 1)
    block_width = 8 * (max((one >> 4 for one in samplings), default=0) or 1)
    height, width = int.from_bytes(data[frame + 3 : frame + 5]), int.from_bytes(data[frame + 5 : frame + 7])
    rows, columns = -(-height // block_height), -(-width // block_width)
    restarts = [int.from_bytes(data[one.body + 2 : one.end]) for one in segments if one.marker == DRI]
    interval, taller = [0, *restarts][-1] or rows * columns, rows * block_height + 1
    # The decoder counts restarts modulo 8, and would accept data that end 8 restarts early.
    counts_differ = restarts and len(_RESTART.findall(data, scan.end)) != rows * columns // interval - 1
    # Both numbers have 2 bytes in the header.
    if max(interval, taller) > 0xFFFF or rows * columns % interval or counts_differ:
        return None
    restart = b"\xff\xdd\x00\x04" + interval.to_bytes(2)
    header = data[: frame + 3], taller.to_bytes(2), data[frame + 5 : scan.start], restart
    # Use a view: a copy of a photograph would add a tenth to the time of its verification.
    return b"".join((*header, memoryview(data)[scan.start : end], _PADDING, JPEG_END))


def _count_by_extending(extended: bytes, decode: Decode) -> int:
    """Return the number of bytes left over, which the decoder skips where it expects the last restart."""
    try:
        decode(extended)
    except ValueError as error:
        reported = _LEFT_OVER.search(str(error))
        if reported is None or int(reported[1]) < len(_PADDING):
            raise
        return int(reported[1]) - len(_PADDING)
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
    """Return the number of last bytes that no pixel depends on, by a tolerant decoder, which finds nearly all damage.

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


def without_ancillary_chunks(data: bytes, *others: bytes) -> bytes:
    """Return a PNG with its critical chunks, on which its colors depend (PNG specification, 5.4), and `others`."""
    return PNG_START + b"".join(chunk for chunk in _chunks(data) if chunk[4:8] in (*_CRITICAL, *others))


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


def joined(data: bytes, without: Container[int] = METADATA, segments: Sequence[Any] = ()) -> bytes:
    """Return a JPEG without bytes that belong to no segment, and without segments of some markers.

    No coefficient depends on the removed bytes. Adobe's marker holds the color space.
    """
    view, segments = memoryview(data), segments or [*jpeg_segments(data)]
    parts = [view[:2]]
    for segment, following in zip(segments, [*segments[1:], None], strict=True):
        if segment.marker not in without:
            end = following.start if following and segment.marker == SOS else segment.end
            parts.append(view[segment.start : end])
    return b"".join(parts)


def _has_every_scan(data: bytes, segments: Sequence[Segment]) -> bool:
    """Return whether the scans contain every coefficient of every component to its last bit (T.81, G.1.1.1).

    A progressive file that was cut between two scans and closed with an end marker decodes without an error, to a
    coarse image. A file with one scan for each component also decodes without an error if its last scans are missing.
    """
    bits_left: dict[tuple[int, int], int | None] = {}
    progressive = False
    for marker, _, body, end in segments:
        if marker in FRAMES:
            progressive = marker in PROGRESSIVE
            bits_left |= dict.fromkeys(product(data[body + 8 : end : 3], range(64 if progressive else 1)))
        elif marker == SOS:
            first, last, low = (data[end - 3], data[end - 2], data[end - 1] & 15) if progressive else (0, 0, 0)
            sent = bits_left.keys() & product(data[body + 3 : end - 3 : 2], range(first, last + 1))
            bits_left |= dict.fromkeys(sent, low)
    return all(bits == 0 for bits in bits_left.values())


def first_rows(data: bytes, rows: int) -> bytes:
    """Return a JPEG with a smaller height in its header, so that a decoder stops soon after the first `rows` rows."""
    frame = next((segment for segment in jpeg_segments(data) if segment.marker in FRAMES), None)
    # The color of a row depends on the next block, which has at most 32 rows. A progressive scan has all rows.
    rows += 32
    if frame is None or frame.marker in PROGRESSIVE or rows >= int.from_bytes(data[frame.body + 3 : frame.body + 5]):
        return data
    return b"".join((data[: frame.body + 3], rows.to_bytes(2), memoryview(data)[frame.body + 5 :]))


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
