"""Square convolutions that are fast on CPUs, forward and backward. `jaxddp.models.adapt` selects them on CPUs.

XLA's CPU compiler is slow in three cases. (All times are for one core. Other convolutions with the same number of
multiplications take 7 ms.)

- The gradient of a kernel takes 10 to 24 ms. XLA computes this gradient as a convolution with a window as large as the
  image, for which it transposes the images and copies every patch.
- A convolution with a kernel larger than the image, such as 3x3 on a 2x2 map, takes 725 ms.
- The gradient of small images with many features takes 8 to 14 ms, because XLA transposes the kernel first.

This module computes these cases as products of matrices whose rows are patches of the images. Unlike a convolution,
such a product also multiplies the padding. So each product is a `lax.composite` with an attribute for the convolution's
number of multiplications, which counts of operations use.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxddp.models.ops.cpu_depthwise as cpu_depthwise
import jaxddp.models.ops.cpu_grouped as cpu_grouped

# Patches copy each value k * k times. With at least this number of output features, the product saves more time than
# the copies cost (measured with 128 to 512 features on maps of 2x2 to 14x14).
_MANY_FEATURES = 256
# The number of pixels whose patches are multiplied at once. These patches fit in a core's cache, so a product takes 11
# ms. With all patches at once it takes 28 ms.
_BLOCK_PIXELS = 256
# Patches are transposed before the product if channels * features is at least the first number, or if the number of
# channels is below the second number.
_LARGE_KERNEL, _FEW_CHANNELS = 1 << 18, 16

# A product for each element of a larger kernel takes long to compile.
_LARGEST_KERNEL = 13
_CHANNELS_LAST = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, ("NHWC", "HWIO", "NHWC"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolve(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Cross-correlate [B, H, W, C] with [k, k, C, F]: [B, H', W', F], H' = (H + 2 padding - k) // stride + 1.

    With a kernel [k, k, C / G, F] the channels are convolved in G parts. Arrays may have any float
    dtype. The gradient of a kernel is summed in float32 or wider. Only reverse-mode differentiation is supported.

    Args:
        stride: the stride of both axes.
        padding: the number of zeros on each side of both axes.
    """
    if own := _own_implementation(images, kernel):
        product = functools.partial(own.product, stride=stride, padding=padding)
        return _as_composite(product, _multiplications(images, kernel, stride, padding))(images, kernel)
    if not _is_product_faster(images, kernel, kernel.shape[3]):
        return _xla_convolution(images, kernel, stride, padding)
    product = functools.partial(_product, stride=stride, padding=padding)
    return _as_composite(product, _multiplications(images, kernel, stride, padding))(images, kernel)


def conv_general_dilated(
    images: jax.Array,
    kernel: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    **others: Any,
) -> jax.Array:
    """Compute `lax.conv_general_dilated`, with `convolve` if images [B, H, W, C] have grouped channels.

    Give it to a layer, as in `nn.Conv(96, (3, 3), feature_group_count=96, conv_general_dilated=conv_general_dilated)`
    or `nnx.Conv(...)`. On CPUs, jaxddp itself gives it to grouped layers that name no function. The results equal
    those of `lax.conv_general_dilated` to rounding. `precision` is ignored, because CPUs have one.
    """
    arguments = {"lhs_dilation": lhs_dilation, "rhs_dilation": rhs_dilation, "dimension_numbers": dimension_numbers}
    arguments |= {"feature_group_count": feature_group_count, **others}
    strides, dilation = tuple(window_strides), tuple(rhs_dilation or (1,) * (images.ndim - 2))
    is_replaced = (
        images.ndim == 4
        and feature_group_count > 1
        and max(kernel.shape[:2]) <= _LARGEST_KERNEL
        and images.dtype == kernel.dtype
        and set(lhs_dilation or (1,)) == {1}
        and lax.conv_dimension_numbers(images.shape, kernel.shape, dimension_numbers) == _CHANNELS_LAST
        and others.get("preferred_element_type") in (None, images.dtype)
        and others.get("batch_group_count", 1) == 1
    )
    if not is_replaced:
        return lax.conv_general_dilated(images, kernel, strides, padding, **arguments)
    sides = images.shape[1:3]
    reach = [(size - 1) * step + 1 for size, step in zip(kernel.shape[:2], dilation, strict=True)]
    margins = lax.padtype_to_pads(sides, reach, strides, padding) if isinstance(padding, str) else padding
    outputs = [low + side + high - window + 1 for side, (low, high), window in zip(sides, margins, reach, strict=True)]
    if min(outputs) < 1:
        return lax.conv_general_dilated(images, kernel, strides, padding, **arguments)
    is_plain = strides[0] == strides[1] and dilation == (1, 1)
    if is_plain and kernel.shape[0] == kernel.shape[1] and len({*margins[0], *margins[1]}) == 1 and margins[0][0] >= 0:
        return convolve(images, kernel, strides[0], margins[0][0])
    # Zeros make the kernel square. A dilated convolution is one of the pixels with equal remainders by the dilation,
    # which become images of their own.
    size = max(kernel.shape[:2])
    kernel = jnp.pad(kernel, [*((0, size - side) for side in kernel.shape[:2]), (0, 0), (0, 0)])
    parts = [-(-(count + (size - 1) * step) // step) for count, step in zip(outputs, dilation, strict=True)]
    edges = [
        (low, part * step - low - side, 0)
        for (low, _), part, step, side in zip(margins, parts, dilation, sides, strict=True)
    ]
    padded = lax.pad(images, jnp.zeros((), images.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    batch, channels = images.shape[0], images.shape[-1]
    by_remainder = padded.reshape(batch, parts[0], dilation[0], parts[1], dilation[1], channels)
    by_remainder = by_remainder.transpose(0, 2, 4, 1, 3, 5).reshape(-1, *parts, channels)
    results: jax.Array = convolve(by_remainder, kernel, strides[0] if is_plain else 1, 0)  # pyright: ignore
    rows, columns, features = results.shape[1:]
    results = results.reshape(batch, *dilation, rows, columns, features).transpose(0, 3, 1, 4, 2, 5)
    results = results.reshape(batch, rows * dilation[0], columns * dilation[1], features)
    return results if is_plain else results[:, : outputs[0] : strides[0], : outputs[1] : strides[1]]


def _forward(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> tuple[jax.Array, Any]:
    return convolve(images, kernel, stride, padding), (images, kernel)


def _backward(stride: int, padding: int, saved: Any, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
    images, kernel = saved
    settings, size = {"stride": stride, "padding": padding}, kernel.shape[0]
    count = _multiplications(images, kernel, stride, padding)
    if own := _own_implementation(images, kernel):
        of_images = functools.partial(own.images_gradient, shape=images.shape, **settings)
        of_kernel = functools.partial(own.kernel_gradient, shape=kernel.shape, **settings)
        return _as_composite(of_images, count)(grads, kernel), _as_composite(of_kernel, count)(images, grads)

    def images_gradient(convolution: Callable[..., jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
        like = jax.typeof(images)
        return lambda grads, kernel: jax.linear_transpose(lambda x: convolution(x, kernel, **settings), like)(grads)[0]

    kernel_product = _pixels_product if size == 1 else functools.partial(_blocks_product, size=size)
    kernel_gradient = _as_composite(functools.partial(kernel_product, **settings), count)
    # XLA computes the gradient of the images as a convolution of the output's gradient, which is slow on a 2x2 map: 4.2
    # ms instead of 0.5 ms.
    multiplies = _is_product_faster(grads, kernel, kernel.shape[2])
    of_images = _as_composite(images_gradient(_product), count) if multiplies else images_gradient(_xla_convolution)
    return of_images(grads, kernel), kernel_gradient(images, grads)


convolve.defvjp(_forward, _backward)


def _own_implementation(images: jax.Array, kernel: jax.Array) -> Any:
    """Return the module that computes a depthwise or a grouped convolution and its gradients; None for others."""
    if cpu_depthwise.is_depthwise(images, kernel):
        return cpu_depthwise
    return cpu_grouped if cpu_grouped.is_grouped(images, kernel) else None


def _as_composite(
    product: Callable[[jax.Array, jax.Array], jax.Array], multiplications: int
) -> Callable[..., jax.Array]:
    composite = lax.composite(lambda a, b, **_: product(a, b), "jaxddp.convolution")
    return functools.partial(composite, multiplications=np.int64(multiplications))


def _multiplications(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> int:
    """Return the number of multiplications of a convolution and of each of its two gradients, without padding."""
    batch, *sides, _ = images.shape
    size, _, channels, features = kernel.shape

    def taps(side: int) -> int:
        outputs = (side + 2 * padding - size) // stride + 1
        at = stride * np.arange(outputs)[:, None] + np.arange(size) - padding
        return int(((at >= 0) & (at < side)).sum())

    return batch * channels * features * math.prod(map(taps, sides))


def _is_product_faster(images: jax.Array, kernel: jax.Array, features: int) -> bool:
    """Return whether a matrix product is faster on a CPU than XLA's convolution of these images to `features`."""
    size = kernel.shape[0]
    smallest = min(images.shape[1:3])
    return size == 1 or smallest < size or features >= _MANY_FEATURES


def _xla_convolution(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    margins = ((padding, padding), (padding, padding))
    return lax.conv_general_dilated(
        images, kernel, (stride, stride), margins, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _product(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    size, _, channels, features = kernel.shape
    patches = _patches(_pad(images, padding), size, stride)
    rows = patches.reshape(-1, size * size * channels) @ kernel.reshape(-1, features)
    return rows.reshape(*patches.shape[:3], features)


def _pixels_product(images: jax.Array, grads: jax.Array, stride: int, padding: int) -> jax.Array:
    """Return a 1x1 kernel's gradient, [1, 1, C, F]: the sum over pixels of the outer product of pixel and gradient."""
    channels, features = images.shape[-1], grads.shape[-1]
    pixels = _patches(_pad(images, padding), 1, stride).reshape(-1, channels)
    return (
        _sum_outer_products(grads.reshape(-1, features), pixels)
        .T.reshape(1, 1, channels, features)
        .astype(images.dtype)
    )


def _blocks_product(images: jax.Array, grads: jax.Array, size: int, stride: int, padding: int) -> jax.Array:
    """Return a kernel's gradient, [k, k, C, F]: the sum over pixels of the outer product of patch and gradient."""
    batch, height, width, features = grads.shape
    padded = _pad(images, padding)
    channels = images.shape[-1]
    transposed = channels * features >= _LARGE_KERNEL or channels < _FEW_CHANNELS
    count, rows = _block(batch, height, width)
    span, blocks_an_image = (rows - 1) * stride + 1, height // rows

    def product(patch_rows: jax.Array, pixel_grads: jax.Array) -> jax.Array:
        if transposed:
            # The barrier makes XLA transpose the patches in memory, because a transposition within the product is slow.
            laid_out = lax.optimization_barrier(patch_rows.T)
            return jnp.matmul(laid_out, pixel_grads, preferred_element_type=_total_dtype(pixel_grads))
        # The patches are the second operand, because their rows are usually longer than the rows of the gradients.
        return _sum_outer_products(pixel_grads, patch_rows)

    def block(number: jax.Array | int) -> list[jax.Array]:
        """Return the block's gradient for each row of the kernel, [k * C, F] or its transpose."""
        image, row = number // blocks_an_image * count, number % blocks_an_image * rows
        corner = (image * padded.shape[1] + row * stride) * padded.shape[2]
        patch_rows = _patch_rows(padded, corner, (count, span + size - 1, width), size, stride)
        pixel_grads = lax.dynamic_slice(grads, (image, row, 0, 0), (count, rows, width, features))
        pixel_grads = pixel_grads.reshape(-1, features)
        by_kernel_row = (patch_rows[:, first : first + span : stride] for first in range(size))
        return [product(part.reshape(-1, size * channels), pixel_grads) for part in by_kernel_row]

    # `lax.full_like` makes the zeros vary over the devices of a `shard_map`, like the terms that are added to the
    # zeros.
    zeros = [lax.full_like(grads, 0, like.dtype, like.shape) for like in jax.eval_shape(block, 0)]
    totals = lax.fori_loop(
        0, batch // count * blocks_an_image, lambda number, totals: jax.tree.map(jnp.add, totals, block(number)), zeros
    )
    total = jnp.stack(totals if transposed else [part.T for part in totals])
    return total.reshape(size, size, channels, features).astype(images.dtype)


def _sum_outer_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sum the outer products of the rows: [N, A], [N, B] -> [A, B]."""
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=_total_dtype(a))


def _total_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _block(batch: int, height: int, width: int) -> tuple[int, int]:
    """Return the number of images in a block, and the number of rows of each image.

    The block is the smallest one with enough pixels that divides the batch evenly.
    """
    pixels = height * width
    if pixels >= _BLOCK_PIXELS:
        return 1, next(rows for rows in range(1, height + 1) if height % rows == 0 and rows * width >= _BLOCK_PIXELS)
    counts = (count for count in range(1, batch) if batch % count == 0 and count * pixels >= _BLOCK_PIXELS)
    return next(counts, batch), height


def _patch_rows(padded: jax.Array, corner: jax.Array | int, part: tuple[int, int, int], size: int, stride: int) -> Any:
    """Return the rows of the patches for each row of a part of the images: [images, rows, W', k * C].

    An image row belongs to the patches of k output rows, and is copied once for all of them. One gather is faster than
    a slice for each column.

    Args:
        corner: the index of the part's first pixel among all pixels.
        part: the size of the part, (images, rows, W').
    """
    channels = padded.shape[-1]
    image, row, column, tap = np.ogrid[: part[0], : part[1], : part[2] * stride : stride, :size]
    pixels = (((image * padded.shape[1]) + row) * padded.shape[2] + column + tap).astype(np.int32).reshape(-1)
    rows = padded.reshape(-1, channels).at[pixels + corner].get(mode="promise_in_bounds")
    return rows.reshape(*part, size * channels)


def _pad(images: jax.Array, padding: int) -> jax.Array:
    return jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))


def _patches(images: jax.Array, size: int, stride: int) -> jax.Array:
    """Extract patches: [B, H, W, C] -> [B, H', W', k * k * C], in the memory order of a kernel."""
    height, width = ((length - size) // stride * stride + 1 for length in images.shape[1:3])
    taps = [images[:, i : i + height : stride, j : j + width : stride] for i in range(size) for j in range(size)]
    return jnp.concatenate(taps, -1)
