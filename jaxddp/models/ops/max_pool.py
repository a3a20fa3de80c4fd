"""Max pooling with a custom gradient that stores the index of each window's maximum."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def max_pool(images: jax.Array, window: int = 3, stride: int = 2, padding: int = 1) -> jax.Array:
    """Take the maximum over square windows: [B, H, W, C] -> [B, ceil(H/2), ceil(W/2), C] by default.

    Images may have any float dtype with infinities. Values and gradients equal those of `flax.linen.max_pool`: of
    several equal maxima, the first in row-major order gets the whole gradient. Flax's gradient (select and scatter) is
    a serial loop on CPUs, and reads the images again on GPUs. Here a uint8 for each output stores the index of the
    maximum, so `window` is at most 16. Only reverse-mode differentiation is supported, not `jax.jvp`.
    """
    return _forward(images, window, stride, padding)[0]


def _forward(
    images: jax.Array, window: int, stride: int, padding: int
) -> tuple[jax.Array, tuple[jax.Array, tuple[int, ...]]]:
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
    which, shape = saved
    zero = jnp.zeros((), grads.dtype)

    def spread(number: int) -> jax.Array:
        """Return the images' gradient from the windows whose maximum is at the index `number`."""
        firsts = (offset - padding for offset in divmod(number, window))
        margins = [
            (first, side - first - (outputs - 1) * stride - 1, stride - 1)
            for first, side, outputs in zip(firsts, shape[1:3], grads.shape[1:3], strict=True)
        ]
        return lax.pad(jnp.where(which == number, grads, 0), zero, [(0, 0, 0), *margins, (0, 0, 0)])

    return (functools.reduce(jnp.add, map(spread, range(window * window))),)


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
