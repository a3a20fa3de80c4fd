"""The header of an image file, and the format of the decoded pixels."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxddp.config import DataConfig

MAX_PIXELS = 100_000_000
"""The largest number of pixels of an image. Without a limit, a file of a few kilobytes could need gigabytes."""

DOWNLOAD_AGAIN = "download it again or leave it out"
"""The advice for a damaged file."""

PillowKind = Literal["webp", "tiff", "bmp", "ppm"]
"""The kinds of files that Pillow decodes; "ppm" is also PGM and PBM."""
Kind = Literal["jpeg", "png"] | PillowKind


@dataclass(frozen=True)
class ImageHeader:
    """The kind of a file, read from its content and not its name, and the size of its image in pixels."""

    kind: Kind
    height: int
    width: int
    left_over: int = field(default=0, compare=False)
    """The number of bytes after the image data on which no pixel depends; `verify` counts them."""
    bits: int = field(default=8, compare=False)
    """The bits of a value: 1, 2, 4, 8 or 16 in a PNG; in other kinds 16, or 8 if the values have 8 bits or fewer."""


@dataclass(frozen=True)
class PixelFormat:
    """The channels and bits to which every file of a data set is decoded."""

    channels: int = 3
    """1 gray (the luma of RGB, ITU-R BT.601), 3 RGB, 4 RGBA (opaque where the file has no alpha)."""
    bits: int = 8
    """8 or 16. Conversion to 8 bits keeps the upper 8; conversion to 16 repeats the 8 bits, so white stays white."""

    @classmethod
    def of(cls, data: DataConfig) -> "PixelFormat":
        """Return the format of a config."""
        return cls(data.channels, data.bits)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the pixels: uint8 or uint16."""
        return np.dtype(np.uint8 if self.bits == 8 else np.uint16)
