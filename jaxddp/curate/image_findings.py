"""Examines one image: its kind, its size, its unusual properties, and its fault."""

import hashlib
import threading
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.data.images.header import EOI, SOS, Segment, jpeg_segments, parse_header, without_stray_bytes
from jaxddp.data.images.verify import open_sound, verify
from jaxddp.data.source import SourceTable, image_dtype

LARGE = 20_000_000
"""Images with more pixels are decoded one at a time, whatever the number of threads, to bound the memory."""

_ORIENTATION = 0x0112
_KINDS = {
    "jpeg": (".jpeg", ".jpg"),
    "png": (".png",),
    "webp": (".webp",),
    "tiff": (".tif", ".tiff"),
    "bmp": (".bmp",),
    "ppm": (".ppm", ".pgm"),
}
_SUFFIXES = {suffix: kind for kind, suffixes in _KINDS.items() for suffix in suffixes}
_large_images = threading.Lock()


@dataclass(frozen=True)
class ImageFindings:
    """The findings about one image."""

    sha256: bytes | None = None
    """The SHA-256 of the file, or of an array's pixels; None if the image could not be read."""
    size: int = 0
    """The size of the file in bytes."""
    kind: str | None = None
    """jpeg, png, webp, tiff, bmp, ppm, or array. Kind, height and width are None if the header cannot be used."""
    height: int | None = None
    width: int | None = None
    mode: str | None = None
    """Pillow's name of the color space: L, RGB, CMYK, P, RGBA, ...; for an array, the number of channels."""
    notes: tuple[str, ...] = ()
    """Unusual properties that do not prevent training, each as `kind: detail`."""
    fault: str | None = None
    """The reason why training cannot use the image; None if it can."""
    has_stray_bytes: bool = False
    """Whether the file has stray bytes, which are removed each time before it is decoded."""


def examine(source: SourceTable, row: int) -> ImageFindings:
    """Read, hash and verify a row's image. Raises: Unreachable if its store does not answer."""
    name = source.name(row)
    try:
        data = source.read(row)
    except InputError as error:
        return ImageFindings(fault=str(error).removeprefix(f"{name}: "))
    if source.pixel_shape is None:
        return examine_file(data, name)
    image = np.frombuffer(data, image_dtype(source, source.default_data())).reshape(source.pixel_shape)
    height, width, channels = image.shape
    notes = ("constant: every pixel is the same",) if (image == image[0, 0]).all() else ()
    return ImageFindings(hashlib.sha256(data).digest(), len(data), "array", height, width, str(channels), notes)


def examine_file(data: bytes, name: str) -> ImageFindings:
    """Examine an encoded image, and compare the extension of its name with its content."""
    digest, size = hashlib.sha256(data).digest(), len(data)
    try:
        header = parse_header(data)
    except InputError as error:
        return ImageFindings(digest, size, fault=str(error))
    fields: dict = {"kind": header.kind, "height": header.height, "width": header.width}
    try:
        with _large_images if header.height * header.width > LARGE else nullcontext():
            left_over = verify(data).left_over
            mode, notes = _describe(data)
    except InputError as error:
        return ImageFindings(digest, size, **fields, fault=str(error))
    suffix = name[name.rfind(".") :]
    if _SUFFIXES.get(suffix.lower(), header.kind) != header.kind:
        notes.insert(0, f"{header.kind.upper()} named {suffix}: decoded by its content, not its name")
    if left_over:
        notes.append(f"bytes left over: {left_over} behind the last pixel")
    if header.kind == "jpeg":
        notes += _stray_bytes(data)
    has_stray_bytes = without_stray_bytes(data, left_over) is not data
    return ImageFindings(digest, size, **fields, mode=mode, notes=tuple(notes), has_stray_bytes=has_stray_bytes)


def _describe(data: bytes) -> tuple[str, list[str]]:
    """Return the color space of a sound image, and notes on its unusual properties. Raises: see `open_sound`."""
    with open_sound(data) as image:
        mode, info, is_turned = image.mode, image.info, image.format == "TIFF"
        try:
            orientation = image.getexif().get(_ORIENTATION, 1)
        except Exception:  # Broken metadata can cause any error, and no pixel depends on the metadata.
            orientation = 1
    notes = []
    if mode == "CMYK":
        kind = "YCCK" if info.get("adobe_transform") == 2 else "CMYK"
        inverted = "Adobe's inverted kind" if "adobe" in info else "read as not inverted, as Adobe's marker is absent"
        notes.append(f"{kind}: {inverted}; converted to RGB")
    if mode in ("L", "1", "LA") or mode.startswith("I"):
        notes.append("gray: repeated as RGB")
    if mode.startswith("I"):
        notes.append("16 bits: the upper 8 are kept")
    if mode in ("LA", "RGBA", "PA") or "transparency" in info:
        notes.append("transparency: dropped")
    if orientation not in (0, 1) and not is_turned:
        notes.append(f"EXIF orientation: {orientation}, which is ignored; the image is used as stored")
    return mode, notes


def _stray_bytes(data: bytes) -> list[str]:
    """Return notes on the bytes of a JPEG that belong to no segment."""
    notes, previous = [], Segment(0, 0, 0, 2)
    for segment in jpeg_segments(data):
        # Fill bytes may precede a marker.
        gap = data[previous.end : segment.start].rstrip(b"\xff") if previous.marker != SOS else b""
        if gap:
            notes.append(f"extraneous bytes: {len(gap)} before a marker")
        previous = segment
    if previous.marker == EOI and previous.end < len(data):
        notes.append(f"bytes after the end: {len(data) - previous.end}")
    return notes
