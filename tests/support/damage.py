"""Kinds of damage to a JPEG: each maps bytes and random numbers to bytes that a decoder may accept."""

import random
import struct
from collections.abc import Callable

from jaxddp.data.images import DHT, DRI, FRAMES, SOS, Segment, jpeg_segments

Damage = Callable[[bytes, random.Random], bytes]


def segment_of(data: bytes, marker: int) -> Segment | None:
    return next((segment for segment in jpeg_segments(data) if segment.marker == marker), None)


def frame_of(data: bytes) -> Segment:
    return next(segment for segment in jpeg_segments(data) if segment.marker in FRAMES)


def size_of(data: bytes) -> tuple[int, int]:
    return struct.unpack(">HH", data[frame_of(data).body + 3 : frame_of(data).body + 7])


def unit_of(data: bytes) -> tuple[int, int]:
    """Return height and width of the blocks that are coded together."""
    body = frame_of(data).body
    count = data[body + 7]
    each = [data[body + 9 + 3 * i] for i in range(count)] if count > 1 else [0x11]
    return 8 * max(one & 15 for one in each), 8 * max(one >> 4 for one in each)


def blocks_of(data: bytes) -> int:
    """Return the number of 8 x 8 blocks of the frame."""
    body = frame_of(data).body
    each = [data[body + 9 + 3 * i] for i in range(data[body + 7])] if data[body + 7] > 1 else [0x11]
    rows, columns = units(data)
    return rows * columns * sum((one & 15) * (one >> 4) for one in each)


def resized(data: bytes, height: int, width: int) -> bytes:
    place = frame_of(data).body + 3
    return data[:place] + struct.pack(">HH", height, width) + data[place + 4 :]


def units(data: bytes) -> tuple[int, int]:
    (height, width), (tall, wide) = size_of(data), unit_of(data)
    return -(-height // tall), -(-width // wide)


def other_size(rows: Callable[[int], int] = int, columns: Callable[[int], int] = int) -> Damage:
    """Change the numbers of rows and columns of units in the header. Return `data` if none would remain."""

    def damaged(data: bytes, _: random.Random) -> bytes:
        (height, width), (tall, wide), before = size_of(data), unit_of(data), units(data)
        after = rows(before[0]), columns(before[1])
        if min(after) < 1:
            return data
        kept = [side if new == old else None for side, new, old in zip((height, width), after, before, strict=True)]
        return resized(data, kept[0] or after[0] * tall, kept[1] or after[1] * wide)

    return damaged


def any_size(data: bytes, rng: random.Random) -> bytes:
    new = resized(data, rng.randrange(1, 2 * size_of(data)[0]), rng.randrange(1, 2 * size_of(data)[1]))
    return data if units(new)[0] * units(new)[1] == units(data)[0] * units(data)[1] else new


def within(change: Callable[[bytes, random.Random], bytes], length: int) -> Damage:
    """Change a stretch of the image data; a file whose data are not twice as long is unchanged."""

    def damaged(data: bytes, rng: random.Random) -> bytes:
        scan = segment_of(data, SOS)
        assert scan is not None
        first, last = scan.end, data.rindex(b"\xff\xd9") - length
        if last - first < length:
            return data
        start = rng.randrange(first, last)
        return data[:start] + change(data[start : start + length], rng) + data[start + length :]

    return damaged


def frame_kind(marker: int) -> Damage:
    return lambda data, _: data[: frame_of(data).start + 1] + bytes([marker]) + data[frame_of(data).body :]


def sampling(data: bytes, rng: random.Random) -> bytes:
    """Change the sampling of the first component."""
    place = frame_of(data).body + 9
    other = rng.choice([one for one in (0x11, 0x21, 0x12, 0x22, 0x41, 0x13) if one != data[place]])
    new = data[:place] + bytes([other]) + data[place + 1 :]
    return data if blocks_of(data) == blocks_of(new) else new


def symbol(data: bytes, rng: random.Random) -> bytes:
    """Change the coefficient size of one of the first, most frequent codes of a Huffman table."""
    tables = [segment for segment in jpeg_segments(data) if segment.marker == DHT]
    table = rng.choice(tables)
    place = table.body + 19 + rng.randrange(min(4, sum(data[table.body + 3 : table.body + 19])))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(3)]) + data[place + 1 :]


def restarts(interval: int) -> Damage:
    """Change the interval between restarts in the header."""

    def damaged(data: bytes, _: random.Random) -> bytes:
        restart_segment, scan = segment_of(data, DRI), segment_of(data, SOS)
        assert scan is not None
        if restart_segment is None:
            return data[: scan.start] + struct.pack(">BBHH", 0xFF, DRI, 4, interval) + data[scan.start :]
        start, end = restart_segment.body + 2, restart_segment.end
        new = interval + (interval == int.from_bytes(data[start:end]))
        return data[:start] + struct.pack(">H", new) + data[end:]

    return damaged


def swapped_tables(data: bytes, _: random.Random) -> bytes:
    """Swap the names of the first and second Huffman tables."""
    new = bytearray(data)
    for segment in jpeg_segments(data):
        position = segment.body + 2
        while segment.marker == DHT and position < segment.end:
            new[position] ^= 1
            position += 17 + sum(data[position + 1 : position + 17])
    return bytes(new)


HEADERS: dict[str, Damage] = {
    "one row of blocks less": other_size(rows=lambda n: n - 1),
    "one row of blocks more": other_size(rows=lambda n: n + 1),
    "one column of blocks less": other_size(columns=lambda n: n - 1),
    "one column of blocks more": other_size(columns=lambda n: n + 1),
    "half the height": other_size(rows=lambda n: n // 2),
    "half the width": other_size(columns=lambda n: n // 2),
    "any other size": any_size,
    "arithmetic codes": frame_kind(0xC9),
    "progressive with arithmetic codes": frame_kind(0xCA),
    "lossless": frame_kind(0xC3),
    "another sampling": sampling,
    "restarts that are not there": restarts(3),
    "swapped Huffman tables": swapped_tables,
    "a Huffman symbol": symbol,
}
"""Damage to header fields that describe the data."""


def deleted(length: int) -> Damage:
    return within(lambda stretch, rng: b"", length)


def zeroed(length: int) -> Damage:
    return within(lambda stretch, rng: bytes(length), length)


STRETCHES: dict[str, Damage] = {
    "256 bytes deleted": deleted(256),
    "1 KiB deleted": deleted(1024),
    "4 KiB deleted": deleted(4096),
    "256 bytes repeated": within(lambda stretch, rng: 2 * stretch, 256),
    "1 KiB repeated": within(lambda stretch, rng: 2 * stretch, 1024),
    "64 bytes zeroed": zeroed(64),
    "256 bytes zeroed": zeroed(256),
    "1 KiB zeroed": zeroed(1024),
    "512 random bytes": within(lambda stretch, rng: rng.randbytes(512), 512),
    "512 bytes inserted": within(lambda stretch, rng: rng.randbytes(512) + stretch, 512),
    "line ends for Windows": lambda data, _: data.replace(b"\n", b"\r\n"),
    "line ends of the old Mac": lambda data, _: data.replace(b"\r", b"\n"),
}
"""Damage by lost or added data."""

SMALL: dict[str, Damage] = {
    "a bit flipped": within(lambda byte, rng: bytes([byte[0] ^ 1 << rng.randrange(8)]), 1),
    "a byte deleted": deleted(1),
    "a byte repeated": within(lambda stretch, rng: 2 * stretch, 1),
    "16 bytes deleted": deleted(16),
    "16 bytes zeroed": zeroed(16),
    "64 bytes deleted": deleted(64),
    "line ends for Unix": lambda data, _: data.replace(b"\r\n", b"\n"),
}
"""Damage that no decoder can detect, because it often leaves a valid image with the same number of blocks."""
