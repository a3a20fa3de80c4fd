"""Maximum over windows, with a gradient that knows which pixel of each window was the largest."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def max_pool(images: jax.Array, window: int = 3, stride: int = 2, padding: int = 1) -> jax.Array:
    """Maximum over square windows, [B, H, W, C] -> [B, ceil(H/2), ceil(W/2), C] by default; of any float dtype that
    has infinities.

    Values and gradients are those of `flax.linen.max_pool`: of several pixels that tie for the maximum, the first in
    row-major order has all of the gradient. That one's gradient (select and scatter) is a serial loop on CPUs, and on
    GPUs reads the images once more; here a uint8 for each output says which pixel it was, so `window` is at most 16.
    It can be differentiated in reverse mode, but not first in forward mode (`jax.jvp`).
    """
    return _forward(images, window, stride, padding)[0]


def _forward(
    images: jax.Array, window: int, stride: int, padding: int
) -> tuple[jax.Array, tuple[jax.Array, tuple[int, ...]]]:
    pixels = _pixels(images, window, stride, padding)
    largest = next(pixels)
    which = lax.full_like(largest, 0, jnp.uint8)
    for number, pixel in enumerate(pixels, start=1):
        # NaN stays: nothing is larger.
        larger = (pixel > largest) | jnp.isnan(pixel)
        largest = jnp.where(larger, pixel, largest)
        which = jnp.where(larger, jnp.uint8(number), which)
    return largest, (which, images.shape)


def _backward(
    window: int, stride: int, padding: int, saved: tuple[jax.Array, tuple[int, ...]], grads: jax.Array
) -> tuple[jax.Array]:
    which, shape = saved
    zero = jnp.zeros((), grads.dtype)

    def spread(number: int) -> jax.Array:
        """The gradient of the windows whose largest pixel is that one, where it is in the images."""
        firsts = (place - padding for place in divmod(number, window))
        margins = [
            (first, side - first - (outputs - 1) * stride - 1, stride - 1)
            for first, side, outputs in zip(firsts, shape[1:3], grads.shape[1:3], strict=True)
        ]
        return lax.pad(jnp.where(which == number, grads, 0), zero, [(0, 0, 0), *margins, (0, 0, 0)])

    return (functools.reduce(jnp.add, map(spread, range(window * window))),)


max_pool.defvjp(_forward, _backward)


def _pixels(images: jax.Array, window: int, stride: int, padding: int) -> Iterator[jax.Array]:
    """The pixel at each place of every window, in row-major order; each [B, H', W', C]."""
    margins = [(0, 0, 0), (padding, padding, 0), (padding, padding, 0), (0, 0, 0)]
    padded = lax.pad(images, jnp.array(-math.inf, images.dtype), margins)
    batch, height, width, channels = padded.shape
    rows, columns = ((side - window) // stride * stride + 1 for side in (height, width))
    for row in range(window):
        for column in range(window):
            stop = (batch, row + rows, column + columns, channels)
            yield lax.slice(padded, (0, row, column, 0), stop, (1, stride, stride, 1))
