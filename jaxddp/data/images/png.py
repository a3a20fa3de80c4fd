"""Verifies a PNG file to its end: its checksums, and the number of its rows.

Pillow is not enough: it ignores additional rows, and accepts a missing palette, which TensorFlow's decoder rejects.

Section numbers are those of the PNG specification, third edition.
"""

import struct
import zlib
from collections.abc import Iterator

import numpy as np

from jaxddp.data.images.header import PNG_START

# By color type (11.2.1): the bits of a sample, and the samples of a pixel.
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PALETTE = 3
# The first row and column of Adam7's passes, and the steps between rows and columns (8.2).
_NO_PASSES = ((0, 0, 1, 1),)
_ADAM7 = (0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)
_FILTERS = 5
_CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")


def png_bytes_left_over(data: bytes) -> int:
    """Return the number of bytes of image data after the last row. Raises: ValueError or zlib.error if damaged."""
    header, compressed, previous, palette = b"", [], b"", False
    for kind, body in _chunks(data):
        if (kind == b"IHDR") != (previous == b"") or (kind[0] < ord("a") and kind not in _CRITICAL):
            raise ValueError(f"a chunk {kind!r} in a wrong place")
        if kind == b"IHDR":
            header = body
        elif kind == b"IDAT":
            if compressed and previous != kind:
                raise ValueError("image data in two places")
            compressed.append(body)
        elif kind == b"PLTE":
            if compressed or not 0 < len(body) <= 3 * 256 or len(body) % 3:
                raise ValueError(f"a wrong palette of {len(body)} bytes")
            palette = True
        previous = kind
    width, height, depth, color, compression, filtering, interlaced = struct.unpack(">IIBBBBB", header)
    if depth not in _DEPTHS.get(color, ()) or compression or filtering or interlaced > 1:
        raise ValueError(f"a header with {depth} bits of color type {color}, which do not exist")
    if color == _PALETTE and not palette:
        raise ValueError("no palette, though its pixels are indices of one")
    rows = _rows(height, width, depth * _SAMPLES[color], _ADAM7 if interlaced else _NO_PASSES)
    return _check_rows(b"".join(compressed), rows)


def without_ancillary_chunks(data: bytes) -> bytes:
    """Return a sound PNG with its critical chunks only, on which its colors depend (5.4)."""
    critical = (part for part in _chunks(data) if part[0] in _CRITICAL)
    return PNG_START + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in critical
    )


def _rows(height: int, width: int, bits: int, passes: tuple[tuple[int, int, int, int], ...]) -> list[tuple[int, int]]:
    """Return, for each pass, the number of rows and the bytes of a row, including the byte of the filter (7.2)."""
    sizes = []
    for top, left, down, across in passes:
        columns = -(-max(width - left, 0) // across)
        if columns:
            sizes.append((-(-max(height - top, 0) // down), 1 + (columns * bits + 7) // 8))
    return sizes


def _check_rows(compressed: bytes, rows: list[tuple[int, int]]) -> int:
    """Check the compressed rows, and return the number of bytes after them.

    Raises: ValueError or zlib.error if the rows are wrong.
    """
    expected = sum(count * size for count, size in rows)
    stream = zlib.decompressobj()
    pixels = stream.decompress(compressed, expected + 1)
    if len(pixels) != expected:
        raise ValueError(f"{'fewer' if len(pixels) < expected else 'more'} rows than its header says")
    # zlib reads the checksum at the end only if one more byte is requested. That byte must not exist.
    if stream.decompress(stream.unconsumed_tail, 1) or not stream.eof:
        raise ValueError("image data end too early or too late")
    position = 0
    for count, size in rows:
        end = position + count * size
        if count and np.frombuffer(pixels[position:end:size], np.uint8).max() >= _FILTERS:
            raise ValueError("a row with an unknown filter")
        position = end
    return len(stream.unused_data)


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and content of each chunk up to the last one. Raises: ValueError if a checksum is wrong."""
    position, kind = len(PNG_START), b""
    while kind != b"IEND":
        size, kind = struct.unpack_from(">I4s", data, position)
        end = position + 8 + size
        body = data[position + 8 : end]
        if not kind.isalpha() or data[end : end + 4] != struct.pack(">I", zlib.crc32(kind + body)):
            raise ValueError(f"a wrong checksum in the chunk {kind!r} at byte {position:,}")
        yield kind, body
        position = end + 4
