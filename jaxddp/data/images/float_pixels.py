"""Converts images of floating-point numbers to pixels of 8 or 16 bits, or keeps normalized images as float32."""

import logging
from typing import Literal

import numpy as np

from jaxddp.core.errors import InputError, Key, refused

_UINT16_MAX = 65_535
_CHUNK = 1024
"""The number of images that are converted at a time, to bound the memory."""
_log = logging.getLogger("jaxddp.data")

FloatKind = Literal["unit", "normalized"]
"""The meaning of floats: numbers from 0 to 1, or images that are already normalized."""


def check_float_kind(images: np.ndarray, pixels: FloatKind | None) -> None:
    """Check the numbers of images [N, H, W, C] of which the user gives the kind.

    Raises:
        InputError: there is no such kind, the images are no floats, or a number is not finite or, for "unit", outside 0
            to 1. The message names the first row with such a number.
    """
    if pixels is None:
        return
    if pixels not in ("unit", "normalized"):
        raise refused("pixels", pixels, 'give "unit" for floats from 0 to 1, "normalized", or None')
    if not np.issubdtype(images.dtype, np.floating):
        raise InputError(f"pixels={pixels!r}: is for floats, and the images are {images.dtype}; leave pixels out")
    # Another check rejects other shapes.
    for start in range(0, len(images) if images.ndim == 4 else 0, _CHUNK):
        chunk = images[start : start + _CHUNK]
        chunk = chunk.reshape(len(chunk), -1)
        wrong = ~np.isfinite(chunk) if pixels == "normalized" else ~((chunk >= 0) & (chunk <= 1))
        if wrong.any():
            row = int(wrong.any(1).argmax())
            value, expected = (
                chunk[row][wrong[row]][0],
                "finite numbers" if pixels == "normalized" else "numbers from 0 to 1",
            )
            raise InputError(f"pixels={pixels!r}: row {start + row} has the value {value:g}; give {expected}")


def from_floats(images: np.ndarray) -> np.ndarray:
    """Convert images [N, H, W, C] of floats to uint8 or uint16, without loss where possible.

    Numbers from 0 to 1 become uint8 if all are multiples of 1/255, as in an image divided by 255. Otherwise they become
    uint16, rounded to multiples of 1/65,535; a warning is logged if that changes a number. If a number is above 1, all
    numbers must be whole, and they keep their values.

    Raises:
        InputError: a number is negative, infinite, NaN or above 65,535, or the largest number is above 1 and not all
            are whole.
    """
    chunks = [images[start : start + _CHUNK] for start in range(0, len(images), _CHUNK)]
    lowest, highest = float(min(chunk.min() for chunk in chunks)), float(max(chunk.max() for chunk in chunks))
    span = f"images of {images.dtype} from {lowest:g} to {highest:g}"
    if not (lowest >= 0 and np.isfinite(highest)):
        raise InputError(
            f"{span}: give floats from 0 to 1, or uint8 from 0 to 255",
            advice=(
                "do not normalize the images; this is done on the device with ",
                Key("data.mean"),
                " and ",
                Key("data.std"),
            ),
        )
    scales = (1,) if highest > 1 else (255, _UINT16_MAX)
    scale = next((scale for scale in scales if all(_are_multiples(chunk, scale) for chunk in chunks)), None)
    if highest > _UINT16_MAX or (highest > 1 and scale is None):
        advice = f"give floats from 0 to 1, for example images / {highest:g}"
        raise InputError(f"{span}, which are not whole numbers up to {_UINT16_MAX:,}: {advice}")
    if scale is None:
        scale = _UINT16_MAX
        _log.warning(
            f"images: {images.dtype} that are not multiples of 1/255 are kept as uint16, each number rounded by at "
            f"most {0.5 / scale:.1e}"
        )
    pixels = np.empty(images.shape, np.uint16 if scale == _UINT16_MAX or highest > 255 else np.uint8)
    for start, chunk in zip(range(0, len(images), _CHUNK), chunks, strict=True):
        pixels[start : start + _CHUNK] = np.rint(chunk.astype(np.float64) * scale)
    return pixels


def widened(pixels: np.ndarray) -> np.ndarray:
    """Convert uint8 to uint16 by repeating the 8 bits, so white stays white."""
    return pixels.astype(np.uint16) * 257


def _are_multiples(chunk: np.ndarray, scale: int) -> bool:
    """Return whether all numbers are multiples of 1 / scale, within the rounding error of a division."""
    wide = chunk.astype(np.float64)
    return bool((np.abs(wide - np.rint(wide * scale) / scale) <= 2 * np.spacing(chunk)).all())
