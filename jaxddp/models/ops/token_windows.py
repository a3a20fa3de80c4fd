"""Windows of an image for attention, as in Swin Transformers.

Source: Liu et al. 2021, "Swin Transformer" (arXiv:2103.14030), section 3.2.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

_MASKED = -100.0
"""The number that torchvision and timm add to the score of a pair of tokens that must not attend to each other."""


def partition(x: jax.Array, side: int) -> jax.Array:
    """Divide [B, H, W, D] into windows of side x side tokens: [B, H * W / side**2, side**2, D].

    H and W must be multiples of the side.
    """
    batch, height, width, features = x.shape
    rows, columns = height // side, width // side
    x = x.reshape(batch, rows, side, columns, side, features).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, rows * columns, side * side, features)


def merge(windows: jax.Array, size: tuple[int, int], side: int) -> jax.Array:
    """Compose [B, H, W, D], of the size (H, W), from its windows; the inverse of `partition`."""
    batch, _, _, features = windows.shape
    rows, columns = (length // side for length in size)
    x = windows.reshape(batch, rows, columns, side, side, features).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, *size, features)


def relative_positions(side: int) -> np.ndarray:
    """Return the row of each pair of tokens in a table of relative positions: int64[side**2, side**2].

    The table has (2 * side - 1)**2 rows, one for each difference of two positions in a window, and is ordered by the
    difference of the rows and then by that of the columns. The first axis is that of the queries.
    """
    at = np.stack(np.unravel_index(np.arange(side * side), (side, side)))
    down, right = at[:, :, None] - at[:, None, :] + side - 1
    return down * (2 * side - 1) + right


@functools.cache
def shift_mask(size: tuple[int, int], side: int, shift: tuple[int, int]) -> np.ndarray:
    """Return the bias for windows of a cyclically shifted image: float32[windows, side**2, side**2].

    The windows at the lower and right edge have tokens from both edges of the image, which are not neighbours. The bias
    is 0 for tokens of the same part of the image, and -100 otherwise.

    Args:
        size: the height and width of the image in tokens.
        shift: the number of rows and of columns by which the image is shifted; 0 for an axis without a shift.
    """
    parts = [_parts(length, side, by) for length, by in zip(size, shift, strict=True)]
    image = 3 * parts[0][:, None] + parts[1]
    rows, columns = (length // side for length in size)
    windows = image.reshape(rows, side, columns, side).transpose(0, 2, 1, 3).reshape(rows * columns, side * side)
    return np.where(windows[:, :, None] == windows[:, None, :], 0, _MASKED).astype(np.float32)


def _parts(length: int, side: int, shift: int) -> np.ndarray:
    """Return the part of the image to which each position along a shifted axis belongs: 0, 1 or 2."""
    at = np.arange(length)
    return (at >= length - side).astype(int) + (at >= length - shift) if shift else np.zeros(length, int)


def pad_to_multiples(x: jax.Array, side: int) -> jax.Array:
    """Pad [B, H, W, D] with zeros at the lower and right edge, to multiples of the side."""
    below, right = (-length % side for length in x.shape[1:3])
    return jnp.pad(x, ((0, 0), (0, below), (0, right), (0, 0))) if below or right else x
