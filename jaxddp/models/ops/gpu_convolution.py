"""Convolutions of images with few channels that are fast on GPUs. `jaxddp.models.adapt` selects them there."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxddp.models.ops.cpu_convolution import as_composite, count_multiplications, xla_convolution

_FEW_CHANNELS = 4
"""Tensor cores read at least eight channels, so images with three are mostly zeros there."""


def convolve(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Compute `jaxddp.models.ops.cpu_convolution.convolve` to rounding.

    With a stride and at most four channels, a block of stride x stride pixels becomes one pixel with all their
    channels. The kernel gets zeros until its side is a multiple of the stride.
    """
    blocks = stride > 1 and images.shape[-1] <= _FEW_CHANNELS
    return (_convolve_blocks if blocks else xla_convolution)(images, kernel, stride, padding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve_blocks(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    # The products with the zeros do not count.
    count = count_multiplications(images, kernel, stride, padding)
    return as_composite(functools.partial(_block_by_block, stride=stride, padding=padding), count)(images, kernel)


def _block_by_block(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    batch, *sides, channels = images.shape
    size = kernel.shape[0]
    length = -(-size // stride)
    rows, columns = counts = [(side + 2 * padding - size) // stride + length for side in sides]
    margins = [(padding, count * stride - side - padding, 0) for count, side in zip(counts, sides, strict=True)]
    padded = lax.pad(images, jnp.zeros((), images.dtype), [(0, 0, 0), *margins, (0, 0, 0)])
    kernel = jnp.pad(kernel, [(0, length * stride - size)] * 2 + [(0, 0)] * 2)
    blocks = padded.reshape(batch, rows, stride, columns, stride, channels).transpose(0, 1, 3, 2, 4, 5)
    of_blocks = kernel.reshape(length, stride, length, stride, channels, -1).transpose(0, 2, 1, 3, 4, 5)
    depth = stride * stride * channels
    return xla_convolution(
        blocks.reshape(batch, rows, columns, depth), of_blocks.reshape(length, length, depth, -1), 1, 0
    )


def _forward(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> tuple[jax.Array, Any]:
    return _convolve_blocks(images, kernel, stride, padding), (images, kernel)


def _backward(stride: int, padding: int, saved: Any, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
    images, kernel = saved
    count = count_multiplications(images, kernel, stride, padding)

    def images_gradient(grads: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda x: _block_by_block(x, kernel, stride, padding), jax.typeof(images))(grads)[0]

    def kernel_gradient(images: jax.Array, grads: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda x: _block_by_block(images, x, stride, padding), jax.typeof(kernel))(grads)[0]

    return as_composite(images_gradient, count)(grads, kernel), as_composite(kernel_gradient, count)(images, grads)


_convolve_blocks.defvjp(_forward, _backward)
