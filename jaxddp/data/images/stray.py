"""Bytes of a JPEG that belong to no segment. Decoders skip them, and libjpeg writes so to stderr, naming no file."""

from itertools import pairwise

from jaxddp.data.images.header import JPEG_END, JPEG_START, SOS, segments


def without_stray_bytes(data: bytes, left_over: int) -> bytes:
    """The same image without bytes between its segments and `left_over` ones behind its last block; itself without any.

    Args:
        data: a file that `verify` accepts.
        left_over: what `verify` counted.
    """
    if not data.startswith(JPEG_START):
        return data
    found = [*segments(data)]
    parts, strays, position = [data[:2]], left_over > 0, 2
    for segment, following in pairwise(found):
        strays |= not _is_fill(data[position : segment.start])
        position = following.start if segment.marker == SOS else segment.end
        parts.append(data[segment.start : position])
    if not strays and _is_fill(data[position : found[-1].start]):
        return data
    last = parts.pop()
    parts.append(last[: len(last.rstrip(b"\xff")) - left_over])
    return b"".join([*parts, JPEG_END])


def _is_fill(between: bytes) -> bool:
    return not between.strip(b"\xff")
