"""What kinds of image files there are, what is known of each before it is decoded, and the largest that is."""

from dataclasses import dataclass, field
from typing import Literal

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
