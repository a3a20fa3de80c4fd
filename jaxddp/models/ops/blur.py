"""Blur images before a strided convolution, so that the result changes less when the image is shifted.

Source: Zhang 2019, "Making convolutional networks shift-invariant again" (arXiv:1904.11486), with the 3x3 binomial
filter.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxddp.models.ops.conv_norm import ModuleFactory

_LEAST_CHANNELS = 16
_WEIGHTS = (1, 2, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def blur(images: jax.Array, stride: int = 1) -> jax.Array:
    """Convolve each channel with [1, 2, 1] x [1, 2, 1] / 16 and zero padding: [B, H, W, C] -> [B, H', W', C].

    H' is ceil(H / stride). Images may have any float dtype. Sums are computed in float32 or wider, and
    rounded once. Only
    reverse-mode differentiation is supported, not `jax.jvp`.
    """
    wide = jnp.promote_types(images.dtype, jnp.float32)
    batch, height, width, channels = images.shape
    rows, columns = ((side - 1) // stride * stride + 1 for side in (height, width))
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))

    def shifted(row: int, column: int) -> jax.Array:
        stop = (batch, row + rows, column + columns, channels)
        return lax.slice(padded, (0, row, column, 0), stop, (1, stride, stride, 1)).astype(wide)

    # XLA sums the nine slices in one pass over memory, while a separable filter takes two passes. On a CPU the sum
    # takes an eighth of the time of XLA's depthwise convolution.
    taps = [
        row_weight * column_weight / 16 * shifted(row, column)
        for row, row_weight in enumerate(_WEIGHTS)
        for column, column_weight in enumerate(_WEIGHTS)
    ]
    return functools.reduce(jnp.add, taps).astype(images.dtype)


def _forward(images: jax.Array, stride: int) -> tuple[jax.Array, tuple[int, ...]]:
    return blur(images, stride), images.shape


def _backward(stride: int, shape: tuple[int, ...], grads: jax.Array) -> tuple[jax.Array]:
    # A symmetric filter is its own transpose. The gradient that JAX derives would add nine images, one by one.
    margins = [
        (0, side - (outputs - 1) * stride - 1, stride - 1)
        for side, outputs in zip(shape[1:3], grads.shape[1:3], strict=True)
    ]
    spread = lax.pad(grads, jnp.zeros((), grads.dtype), [(0, 0, 0), *margins, (0, 0, 0)])
    return (blur(spread),)


blur.defvjp(_forward, _backward)


def blurring(conv: ModuleFactory) -> ModuleFactory:
    """Wrap a factory of convolutions: strided convolutions first blur images that have 16 channels or more.

    The ResNets of FFCV (github.com/libffcv/ffcv-imagenet, `BlurPoolConv2d`) do the same: they blur before each strided
    convolution except the stem's, and not before the max pool. A blur has no parameters, and the convolutions keep
    their names.

    Args:
        conv: a factory that is called as `conv(features, kernel=3, stride=2, name="conv1")`.
    """

    def factory(features: int, *, kernel: int, stride: int, **options: Any) -> Any:
        if stride == 1:
            return conv(features, kernel=kernel, stride=1, **options)

        def convolve(images: jax.Array) -> jax.Array:
            if images.shape[-1] < _LEAST_CHANNELS:
                return conv(features, kernel=kernel, stride=stride, **options)(images)
            if kernel == 1:
                # A 1x1 convolution reads only the pixels that the strided blur computes.
                return conv(features, kernel=1, stride=1, **options)(blur(images, stride))
            return conv(features, kernel=kernel, stride=stride, **options)(blur(images))

        return convolve

    return factory
