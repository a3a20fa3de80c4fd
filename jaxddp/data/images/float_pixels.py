"""Images of floating-point numbers, as the pixels of 8 or 16 bits that everything else takes."""

import logging

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key

_MOST = 65_535
_AT_ONCE = 1024
"""Images, so that what is computed of them takes little memory."""
_log = logging.getLogger("jaxddp.data")


def from_floats(images: np.ndarray) -> np.ndarray:
    """Images [N, H, W, C] of floats as uint8 or uint16, without loss where there is such a form.

    Numbers from 0 to 1 that are multiples of 1/255, as those of an image divided by 255 are, become uint8. Any others
    from 0 to 1 become uint16, rounded to multiples of 1/65,535, and where that changes any, a line says so. Whole
    numbers of which some are above 1 stay what they are.

    Raises:
        InputError: there is a number below 0, none, or beyond 1 and not whole.
    """
    parts = [images[start : start + _AT_ONCE] for start in range(0, len(images), _AT_ONCE)]
    lowest, highest = float(min(part.min() for part in parts)), float(max(part.max() for part in parts))
    span = f"images of {images.dtype} from {lowest:g} to {highest:g}"
    if not (lowest >= 0 and np.isfinite(highest)):
        raise InputError(
            f"{span}: give floats from 0 to 1, or uint8 from 0 to 255",
            advice=("normalizing happens on the device, by ", Key("data.mean"), " and ", Key("data.std")),
        )
    scales = (1,) if highest > 1 else (255, _MOST)
    scale = next((each for each in scales if all(_are_multiples(part, each) for part in parts)), None)
    if highest > _MOST or (highest > 1 and scale is None):
        advice = f"give floats from 0 to 1, images / {highest:g}"
        raise InputError(f"{span}, which are no whole numbers up to {_MOST:,}: {advice}")
    if scale is None:
        scale = _MOST
        _log.warning(
            f"images: {images.dtype} that are no multiples of 1/255 are kept as uint16, each number rounded by at most "
            f"{0.5 / scale:.1e}"
        )
    pixels = np.empty(images.shape, np.uint16 if scale == _MOST or highest > 255 else np.uint8)
    for start, part in zip(range(0, len(images), _AT_ONCE), parts, strict=True):
        pixels[start : start + _AT_ONCE] = np.rint(part.astype(np.float64) * scale)
    return pixels


def widened(pixels: np.ndarray) -> np.ndarray:
    """uint8 as uint16: 8 bits are repeated, and white stays white."""
    return pixels.astype(np.uint16) * 257


def _are_multiples(part: np.ndarray, scale: int) -> bool:
    """Whether numbers are multiples of 1 / scale, but for the last bits that a division by it may leave."""
    wide = part.astype(np.float64)
    return bool((np.abs(wide - np.rint(wide * scale) / scale) <= 2 * np.spacing(part)).all())
