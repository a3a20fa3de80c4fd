"""Makes the bytes of many common and unusual kinds of JPEG and PNG files."""

import io
import struct
import zlib

import numpy as np
import simplejpeg
from PIL import Image

from jaxddp.core.errors import InputError
from jaxddp.data.images import PNG_START, verify

EOI = b"\xff\xd9"


def encode(image: np.ndarray | Image.Image, form: str = "JPEG", **options) -> bytes:
    file, exact = io.BytesIO(), {"lossless": True, "exact": True} if form == "WEBP" else {}
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, form, **exact, **options)
    return file.getvalue()


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0, noise: float = 25) -> Image.Image:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([127 + 90 * np.sin(y / (5 + c)) * np.cos(x / (7 - c)) for c in range(3)], -1)
    pixels = np.clip(waves + rng.normal(0, noise, waves.shape), 0, 255).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def ycck() -> bytes:
    return simplejpeg.encode_jpeg(np.asarray(picture(37, 45, "CMYK")), colorspace="CMYK", colorsubsampling="420")


def passes(data: bytes) -> bool:
    try:
        verify(data)
    except InputError as error:
        assert "\n" not in str(error)
        return False
    return True


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def at_start(data: bytes, more: bytes) -> bytes:
    return data[:2] + more + data[2:]


def before_scan(data: bytes, more: bytes) -> bytes:
    scan = data.rindex(b"\xff\xda")
    return data[:scan] + more + data[scan:]


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    results, position = [], len(PNG_START)
    while position < len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        results.append((kind, data[position + 8 : position + 8 + size]))
        position += 12 + size
    return results


def png(parts: list[tuple[bytes, bytes]]) -> bytes:
    return PNG_START + b"".join(chunk(*part) for part in parts)


def interlaced(mode: str) -> bytes:
    """Return an Adam7-interlaced PNG, which Pillow cannot write."""
    pixels = np.asarray(picture(13, 17, mode))
    coded = b""
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    for top, left, down, across in passes:
        coded += b"".join(b"\0" + row.tobytes() for row in pixels[top::down, left::across])
    header = struct.pack(">IIBBBBB", 17, 13, 8, {"L": 0, "RGB": 2}[mode], 0, 0, 1)
    return png([(b"IHDR", header), (b"IDAT", zlib.compress(coded)), (b"IEND", b"")])


PNGS = {
    "color": lambda: encode(picture(13, 17), "PNG"),
    "gray": lambda: encode(picture(13, 17, "L"), "PNG"),
    "palette": lambda: encode(picture(13, 17, "P"), "PNG"),
    "one bit": lambda: encode(picture(13, 17, "1"), "PNG"),
    "alpha": lambda: encode(picture(13, 17, "RGBA"), "PNG"),
    "16 bits": lambda: encode(Image.fromarray(np.asarray(picture(13, 17, "L")).astype(np.uint16) * 200), "PNG"),
    "interlaced": lambda: interlaced("RGB"),
    "interlaced gray": lambda: interlaced("L"),
}
