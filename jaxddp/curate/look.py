"""One image looked at: what it is, what is remarkable about it, and what is wrong with it."""

import hashlib
import threading
from dataclasses import dataclass

import numpy as np

from jaxddp.data.arrays import ArrayTable
from jaxddp.data.images.header import ImageHeader, parse_header
from jaxddp.data.images.markers import EOI, SOS, Segment, segments
from jaxddp.data.images.pillow import open_sound
from jaxddp.data.images.verify import verify
from jaxddp.data.table import ExampleTable
from jaxddp.errors import InputError

LARGE = 20_000_000
"""More pixels than these are decoded one image at a time, whatever the threads: that bounds the memory."""

_ORIENTATION = 0x0112
_SUFFIXES = {".jpeg": "jpeg", ".jpg": "jpeg", ".png": "png"}
_large = threading.Lock()


@dataclass(frozen=True)
class Look:
    """What one image turned out to be.

    Attributes:
        sha256: of the file, or of an array's pixels; None where it could not be read.
        size: of the file, in bytes.
        kind: jpeg, png, or array; None where the header is unusable, and so are height and width.
        mode: Pillow's name of the color space: L, RGB, CMYK, P, RGBA, ...; of arrays, the number of channels.
        notes: what is remarkable and yet trains as it should, each as `kind: detail`.
        fault: why the image cannot be trained on; None where it can.
    """

    sha256: bytes | None = None
    size: int = 0
    kind: str | None = None
    height: int | None = None
    width: int | None = None
    mode: str | None = None
    notes: tuple[str, ...] = ()
    fault: str | None = None


def look_at(table: ExampleTable | ArrayTable, row: int) -> Look:
    """A row's image, read, hashed and verified.

    Raises:
        Unreachable: its store gave no answer, so that nothing is known of it.
    """
    if isinstance(table, ArrayTable):
        return _look_at_pixels(table.images[row])
    name = table.name(row)
    try:
        data = table.read(row)
    except InputError as error:
        return Look(fault=str(error).removeprefix(f"{name}: "))
    return look_at_file(data, name)


def look_at_file(data: bytes, name: str) -> Look:
    """An encoded image; its name serves to compare the extension with the content."""
    digest, size = hashlib.sha256(data).digest(), len(data)
    try:
        header = parse_header(data)
    except InputError as error:
        return Look(digest, size, fault=str(error))
    found: dict = {"kind": header.kind, "height": header.height, "width": header.width}
    try:
        if header.height * header.width > LARGE:
            with _large:
                verify(data)
        else:
            verify(data)
    except InputError as error:
        return Look(digest, size, **found, fault=str(error))
    mode, notes = _describe(data, header)
    return Look(digest, size, **found, mode=mode, notes=(*_misnamed(name, header), *notes))


def _look_at_pixels(image: np.ndarray) -> Look:
    height, width, channels = image.shape
    pixels = np.ascontiguousarray(image)
    notes = ("constant: every pixel is the same",) if (pixels == pixels[0, 0]).all() else ()
    digest = hashlib.sha256(pixels.data).digest()
    return Look(digest, pixels.nbytes, "array", height, width, str(channels), notes)


def _misnamed(name: str, header: ImageHeader) -> list[str]:
    suffix = name[name.rfind(".") :]
    if _SUFFIXES.get(suffix.lower(), header.kind) == header.kind:
        return []
    return [f"{header.kind.upper()} named {suffix}: decoded by its content"]


def _describe(data: bytes, header: ImageHeader) -> tuple[str, list[str]]:
    """The color space of a sound image, and what is remarkable about it."""
    with open_sound(data) as image:
        mode, info = image.mode, image.info
        try:
            orientation = image.getexif().get(_ORIENTATION, 1)
        except Exception:  # Metadata that no pixel depends on may be broken in any way.
            orientation = 1
    notes = []
    if mode == "CMYK":
        kind = "YCCK" if info.get("adobe_transform") == 2 else "CMYK"
        inverted = "Adobe's inverted kind" if "adobe" in info else "taken for not inverted, as Adobe's marker is absent"
        notes.append(f"{kind}: {inverted}; converted to RGB")
    if mode in ("L", "1", "LA") or mode.startswith("I"):
        notes.append("gray: repeated as RGB")
    if mode.startswith("I"):
        notes.append("16 bits: the upper 8 are kept")
    if mode in ("LA", "RGBA", "PA") or "transparency" in info:
        notes.append("transparency: dropped")
    if orientation not in (0, 1):
        notes.append(f"EXIF orientation: {orientation}, which is ignored; trains as stored")
    return mode, notes + (_stray_bytes(data) if header.kind == "jpeg" else [])


def _stray_bytes(data: bytes) -> list[str]:
    """Bytes of a JPEG that no segment accounts for."""
    notes, before = [], Segment(0, 0, 0, 2)
    for segment in segments(data):
        # A marker may have fill bytes before it.
        gap = data[before.end : segment.start].rstrip(b"\xff") if before.marker != SOS else b""
        if gap:
            notes.append(f"extraneous bytes: {len(gap)} before a marker")
        before = segment
    if before.marker == EOI and before.end < len(data):
        notes.append(f"bytes after the end: {len(data) - before.end}")
    return notes
