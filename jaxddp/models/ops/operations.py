"""The operations of a network whose implementation depends on the platform, and max pooling with a custom gradient."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_IN_BOUNDS = "promise_in_bounds"
_NOWHERE = 255
"""A position that no pixel of a window has."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def max_pool(images: jax.Array, window: int = 3, stride: int = 2, padding: int = 1) -> jax.Array:
    """Take the maximum over square windows: [B, H, W, C] -> [B, ceil(H/2), ceil(W/2), C] by default.

    Images may have any float dtype with infinities. Values and gradients equal those of `flax.linen.max_pool`: of
    several equal maxima, the first in row-major order gets the whole gradient. Flax's gradient (select and scatter) is
    a serial loop on CPUs, and reads the images again on GPUs. Here a uint8 for each output stores the index of the
    maximum. Only reverse-mode differentiation is supported, not `jax.jvp`.

    Raises:
        ValueError: the window is larger than 15x15, whose positions and `_NOWHERE` fit into a uint8.
    """
    return _forward(images, window, stride, padding)[0]


def _forward(
    images: jax.Array, window: int, stride: int, padding: int
) -> tuple[jax.Array, tuple[jax.Array, tuple[int, ...]]]:
    if window**2 > _NOWHERE:
        raise ValueError(f"a window of {window}x{window} pixels: give at most 15x15")
    pixels = _pixels(images, window, stride, padding)
    largest = next(pixels)
    which = lax.full_like(largest, 0, jnp.uint8)
    for number, pixel in enumerate(pixels, start=1):
        # A maximum of NaN stays NaN, because no comparison with NaN is true.
        larger = (pixel > largest) | jnp.isnan(pixel)
        largest = jnp.where(larger, pixel, largest)
        which = jnp.where(larger, jnp.uint8(number), which)
    return largest, (which, images.shape)


def _backward(
    window: int, stride: int, padding: int, saved: tuple[jax.Array, tuple[int, ...]], grads: jax.Array
) -> tuple[jax.Array]:
    which, (_, height, width, _) = saved
    zero = jnp.zeros((), grads.dtype)

    def gradient(rows: _Windows, columns: _Windows) -> jax.Array:
        """Return the gradient from one window of each pixel; it is zero if another pixel is the window's maximum."""
        at = slice(None), rows.numbers[:, None], columns.numbers
        position = rows.positions[:, None] * window + columns.positions
        position = np.where(rows.covers[:, None] & columns.covers, position, _NOWHERE).astype(np.uint8)
        is_maximum = which.at[at].get(mode=_IN_BOUNDS) == position[..., None]
        return jnp.where(is_maximum, grads.at[at].get(mode=_IN_BOUNDS), zero)

    sides = zip((height, width), grads.shape[1:3], strict=True)
    rows, columns = (_windows_of_pixels(side, count, window, stride, padding) for side, count in sides)
    return (functools.reduce(jnp.add, itertools.starmap(gradient, itertools.product(rows, columns))),)


class _Windows(NamedTuple):
    """One window for each pixel along an axis."""

    numbers: np.ndarray
    """int64[side], the number of the window; any number in bounds if there is no such window."""
    positions: np.ndarray
    """int64[side], the position of the pixel in the window."""
    covers: np.ndarray
    """bool[side], whether the window exists and contains the pixel."""


def _windows_of_pixels(side: int, count: int, window: int, stride: int, padding: int) -> list[_Windows]:
    """Return the windows that contain each pixel of an axis, in the order of the pixel's position in them.

    The gradient gathers these few windows for each pixel. The sum of one padded array for each position in a window
    takes several times as many instructions on a GPU.
    """
    pixels, found = np.arange(side), []
    first, last = -((window - 1 - padding) // stride), (stride - 1 + padding) // stride
    for distance in range(last, first - 1, -1):
        numbers = pixels // stride + distance
        positions = pixels + padding - numbers * stride
        covers = (numbers >= 0) & (numbers < count) & (positions >= 0) & (positions < window)
        found.append(_Windows(numbers.clip(0, count - 1), positions, covers))
    return found


max_pool.defvjp(_forward, _backward)


def _pixels(images: jax.Array, window: int, stride: int, padding: int) -> Iterator[jax.Array]:
    """Yield the pixels at each position within the windows, in row-major order; each [B, H', W', C]."""
    margins = [(0, 0, 0), (padding, padding, 0), (padding, padding, 0), (0, 0, 0)]
    padded = lax.pad(images, jnp.array(-math.inf, images.dtype), margins)
    batch, height, width, channels = padded.shape
    rows, columns = ((side - window) // stride * stride + 1 for side in (height, width))
    for row in range(window):
        for column in range(window):
            stop = (batch, row + rows, column + columns, channels)
            yield lax.slice(padded, (0, row, column, 0), stop, (1, stride, stride, 1))


# Type checkers do not accept a `jax.custom_vjp` as a callable.
Convolution: TypeAlias = Any
"""(images [B, H, W, C], kernel [k, k, C, F], stride, padding) -> [B, H', W', F]."""
MaxPool: TypeAlias = Any
"""(images [B, H, W, C], window, stride, padding) -> [B, H', W', C]."""


def flax_max_pool(images: jax.Array, window: int = 3, stride: int = 2, padding: int = 1) -> jax.Array:
    """Take the maximum over square windows by `flax.linen.max_pool`, whose gradient is XLA's select and scatter."""
    # Flax annotates paddings as a string.
    margins: Any = ((padding, padding), (padding, padding))
    return nn.max_pool(images, (window, window), (stride, stride), margins)


@dataclass(frozen=True)
class Operations:
    """The implementations that a network uses.

    Attributes:
        convolution: the function that computes convolutions; None for Flax's default.
        grouped_convolution: the function with the arguments of `lax.conv_general_dilated` that computes convolutions in
            grouped channels in networks of users; None for Flax's default.
        max_pool: the function that computes max pooling.
        custom_norm_gradient: whether batch norms use the custom gradient of `jaxddp.models.ops.batch_norm`.
    """

    convolution: Convolution | None = None
    grouped_convolution: Convolution | None = None
    max_pool: MaxPool = max_pool
    custom_norm_gradient: bool = True

    def conv_general_dilated(self, stride: int, padding: int) -> Callable[..., jax.Array] | None:
        """Return the argument `conv_general_dilated` of `flax.linen.Conv` for one stride and padding."""
        convolution = self.convolution
        if convolution is None:
            return None
        return lambda images, kernel, *_, **__: convolution(images, kernel, stride, padding)
