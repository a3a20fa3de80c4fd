"""How the pixels of a decoded file are kept: how many channels, and of how many bits."""

from dataclasses import dataclass

import numpy as np

from jaxddp.config import DataConfig


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
