"""What a file of an image says before it is decoded, and the format of pixels to which it is decoded."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxddp.config import DataConfig

MAX_PIXELS = 100_000_000
"""The largest image that is decoded: a file of a few kilobytes can ask for gigabytes of memory."""

AGAIN = "download it again or leave it out"
"""What to do about a file that is damaged."""

PillowKind = Literal["webp", "tiff", "bmp"]
"""The kinds that Pillow decodes."""
Kind = Literal["jpeg", "png"] | PillowKind


@dataclass(frozen=True)
class ImageHeader:
    """The kind of a file, by its content and not by its name, and the size of its image in pixels."""

    kind: Kind
    height: int
    width: int
    left_over: int = field(default=0, compare=False)
    """Bytes behind the image data that no pixel depends on; `verify` counts them."""
    bits: int = field(default=8, compare=False)
    """Of a value: 1 to 16 of a PNG; of other kinds 16, or 8 for those that have no more."""


@dataclass(frozen=True)
class PixelFormat:
    """What every file of a data set is decoded to, whatever it holds itself."""

    channels: int = 3
    """1 gray (the luma of RGB, ITU-R BT.601), 3 RGB, 4 RGBA (opaque where the file has no alpha)."""
    bits: int = 8
    """8 or 16 a value. Of 16 bits, 8 keep the upper half; 8 bits are repeated to become 16, and white stays white."""

    @classmethod
    def of(cls, data: DataConfig) -> "PixelFormat":
        """That of a config."""
        return cls(data.channels, data.bits)

    @property
    def dtype(self) -> np.dtype:
        """Of the pixels: uint8 or uint16."""
        return np.dtype(np.uint8 if self.bits == 8 else np.uint16)
