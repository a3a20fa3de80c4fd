"""Square convolutions that are fast on CPUs or on GPUs, forward and backward. `jaxddp.models.adapt` selects them.

XLA's CPU compiler is slow in five cases. (The times of the first three are for one core. Other convolutions with the
same number of multiplications take 7 ms.)

- The gradient of a kernel takes 10 to 24 ms. XLA computes this gradient as a convolution with a window as large as the
  image, for which it transposes the images and copies every patch.
- A convolution with a kernel larger than the image, such as 3x3 on a 2x2 map, takes 725 ms.
- The gradient of small images with many features takes 8 to 14 ms, because XLA transposes the kernel first.
- Depthwise convolutions: for 8 images of 56x56 with 96 channels and a 7x7 kernel on two cores, XLA's takes 158 ms, and
  the sum of shifted images 6 ms. For a float64 kernel larger than the image, XLA's takes 336 ms and this sum 0.1 ms.
- The gradient of a grouped kernel is a convolution for each pair of channels.

This module computes these cases as products of matrices whose rows are patches of the images. Unlike a convolution,
such a product also multiplies the padding. So each product is a `lax.composite` with an attribute for the convolution's
number of multiplications, which counts of operations use.

On GPUs, tensor cores read at least eight channels, so the first convolution's three are mostly zeros there. With a
stride, a block of pixels becomes one pixel with all their channels.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching, lax

from jaxddp.models.ops.layers import pixels_of_windows

# Patches copy each value k * k times. With at least this number of output features, the product saves more time than
# the copies cost (measured with 128 to 512 features on maps of 2x2 to 14x14).
_MANY_FEATURES = 256
# The number of pixels whose patches are multiplied at once. These patches fit in a core's cache, so a product takes 11
# ms. With all patches at once it takes 28 ms.
_BLOCK_PIXELS = 256
# Patches are transposed before the product if channels * features is at least the first number, or if the number of
# channels is below the second number.
_LARGE_KERNEL, _FEW_CHANNELS = 1 << 18, 16
# Groups with fewer channels are merged, with zeros between them. The products then have more multiplications, but
# matrices with few columns are slow.
_LEAST_CHANNELS = 16

# The largest number of channels whose pixels become blocks on GPUs.
_FEW_ON_GPUS = 4
# A product for each element of a larger kernel takes long to compile.
_LARGEST_KERNEL = 13
_CHANNELS_LAST = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, ("NHWC", "HWIO", "NHWC"))
Shape = tuple[int, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolve_on_cpu(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Cross-correlate [B, H, W, C] with [k, k, C, F]: [B, H', W', F], H' = (H + 2 padding - k) // stride + 1.

    With a kernel [k, k, C / G, F] the channels are convolved in G parts. Arrays may have any float
    dtype. The gradient of a kernel is summed in float32 or wider. Only reverse-mode differentiation is supported.

    Args:
        stride: the stride of both axes.
        padding: the number of zeros on each side of both axes.
    """
    return _forward(images, kernel, stride, padding)[0]


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
    """Compute `lax.conv_general_dilated`, with `convolve_on_cpu` if images [B, H, W, C] have grouped channels.

    Give it to a layer, as in `nn.Conv(96, (3, 3), feature_group_count=96, conv_general_dilated=conv_general_dilated)`
    or `nnx.Conv(...)`. On CPUs, jaxddp itself gives it to grouped layers that name no function. The results equal
    those of `lax.conv_general_dilated` to rounding. `precision` is ignored, because CPUs have one.
    """
    strides, dilation, sides = tuple(window_strides), rhs_dilation or (1, 1), images.shape[1:3]
    reach = [(size - 1) * step + 1 for size, step in zip(kernel.shape[:2], dilation, strict=False)]
    is_replaced = (
        images.ndim == 4
        and feature_group_count > 1
        and max(reach) <= _LARGEST_KERNEL
        and images.dtype == kernel.dtype
        and set(lhs_dilation or (1,)) == {1}
        and lax.conv_dimension_numbers(images.shape, kernel.shape, dimension_numbers) == _CHANNELS_LAST
        and others.get("preferred_element_type") in (None, images.dtype)
        and others.get("batch_group_count", 1) == 1
    )
    margins: Any = padding
    if is_replaced:
        margins = lax.padtype_to_pads(sides, reach, strides, padding) if isinstance(padding, str) else padding
        spans = zip(sides, margins, reach, strict=True)
        is_replaced = all(low + side + high >= window for side, (low, high), window in spans)
    if not is_replaced:
        arguments = {"lhs_dilation": lhs_dilation, "rhs_dilation": rhs_dilation, "dimension_numbers": dimension_numbers}
        arguments |= {"feature_group_count": feature_group_count, **others}
        return lax.conv_general_dilated(images, kernel, strides, padding, **arguments)
    # Zeros in the kernel make it square, and replace its dilation.
    zero, keep, size = jnp.zeros((), images.dtype), (0, 0, 0), max(reach)
    holes = [(0, size - window, step - 1) for window, step in zip(reach, dilation, strict=True)]
    kernel = lax.pad(kernel, zero, [*holes, keep, keep])
    edges = [(low, high + size - window) for (low, high), window in zip(margins, reach, strict=True)]
    margin = edges[0][0] if len({*edges[0], *edges[1]}) == 1 and edges[0][0] > 0 else 0
    images = images if margin else lax.pad(images, zero, [keep, *((*edge, 0) for edge in edges), keep])
    stride = strides[0] if len({*strides}) == 1 else 1
    results: jax.Array = convolve_on_cpu(images, kernel, stride, margin)
    return results if stride == max(strides) else results[:, :: strides[0], :: strides[1]]


# A policy of `jax.checkpoint` does not look into a `jax.custom_vjp`, so a forward pass does not call one.
def _forward(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> tuple[jax.Array, Any]:
    product, _ = _functions_for(images, kernel)
    if product is _dense_product and not _is_product_faster(images, kernel, kernel.shape[3]):
        return _xla_convolution(images, kernel, stride, padding), (images, kernel)
    product = functools.partial(product, stride=stride, padding=padding)
    return _as_composite(product, _multiplications(images, kernel, stride, padding))(images, kernel), (images, kernel)


def _backward(stride: int, padding: int, saved: Any, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
    images, kernel = saved
    settings, (product, gradient) = {"stride": stride, "padding": padding}, _functions_for(images, kernel)
    count = _multiplications(images, kernel, stride, padding)
    kernel_gradient = functools.partial(gradient, shape=kernel.shape, **settings)
    images_gradient = functools.partial(_images_gradient, product, shape=images.shape, **settings)
    # JAX keeps the function of a composite, which must not hold arrays of the trace (`jax_check_tracer_leaks`).
    is_counted, like = True, jax.typeof(images)
    if product is _dense_product:
        # XLA computes the gradient of the images as a convolution of the output's gradient, which is slow on a 2x2 map:
        # 4.2 ms instead of 0.5 ms.
        is_counted = _is_product_faster(grads, kernel, kernel.shape[2])
        convolution = product if is_counted else _xla_convolution

        def images_gradient(grads: jax.Array, kernel: jax.Array) -> jax.Array:
            transposed = jax.linear_transpose(lambda x: convolution(x, kernel, **settings), like)
            return transposed(grads)[0]

    of_images = _as_composite(images_gradient, count) if is_counted else images_gradient
    return of_images(grads, kernel), _as_composite(kernel_gradient, count)(images, grads)


convolve_on_cpu.defvjp(_forward, _backward)


def _functions_for(images: jax.Array, kernel: jax.Array) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Return the function of (images, kernel, stride, padding) that computes a dense, depthwise or grouped product.

    The second one computes the gradient of the kernel.
    """
    inputs, features = kernel.shape[2:]
    if inputs == images.shape[-1]:
        return _dense_product, _dense_gradient
    is_depthwise = inputs == 1 and features == images.shape[-1]
    return (_depthwise_product, _depthwise_gradient) if is_depthwise else (_grouped_product, _grouped_gradient)


def _as_composite(product: Callable[..., jax.Array], multiplications: int) -> Callable[..., jax.Array]:
    """Return the product as a composite with a convolution's number of multiplications; `jax.vmap` makes it plain."""
    composite = lax.composite(lambda a, b, **_: product(a, b), "jaxddp.convolution")
    counted = custom_batching.custom_vmap(functools.partial(composite, multiplications=np.int64(multiplications)))

    # JAX cannot batch a composite.
    @counted.def_vmap
    def batched(_: int, is_batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        return jax.vmap(product, tuple(0 if each else None for each in is_batched))(*arrays), True

    return counted


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
    return size == 1 or min(images.shape[1:3]) < size or features >= _MANY_FEATURES


def _xla_convolution(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    settings: Any = {"dimension_numbers": _CHANNELS_LAST, "feature_group_count": images.shape[-1] // kernel.shape[2]}
    return lax.conv_general_dilated(images, kernel, (stride, stride), ((padding, padding),) * 2, **settings)


def _dense_product(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    patches = _patches(_pad(images, padding), kernel.shape, stride)
    rows = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, kernel.shape[3])
    return rows.reshape(*patches.shape[:3], -1)


def _depthwise_product(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Compute the sum of shifted images, each times an element of the kernel [k, l, 1, C]."""
    pixels = pixels_of_windows(_pad(images, padding), kernel.shape, stride)
    return functools.reduce(jnp.add, map(jnp.multiply, pixels, kernel.reshape(-1, kernel.shape[3])))


def _grouped_product(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Compute a product of matrices for each (merged) group: the kernel is [k, l, C / groups, F]."""
    matrices = _merge(kernel, images.shape[-1] // kernel.shape[2])
    count = len(matrices)

    def block(images: jax.Array) -> jax.Array:
        patches = _patches(_by_group(_pad(images, padding), count), kernel.shape, stride)
        rows = lax.dot_general(patches.reshape(count, -1, patches.shape[-1]), matrices, (((2,), (1,)), ((0,), (0,))))
        return rows.reshape(*patches.shape[:-1], -1).transpose(1, 2, 3, 0, 4).reshape(*patches.shape[1:4], -1)

    results = lax.map(block, _blocks(images))
    return results.reshape(len(images), *results.shape[2:])


def _images_gradient(
    product: Callable[..., jax.Array], grads: jax.Array, kernel: jax.Array, *, shape: Shape, stride: int, padding: int
) -> jax.Array:
    """Compute the gradient of images [B, H, W, C] of this shape from that of the result, [B, H', W', F].

    The pixels whose rows and columns have the same remainders by the stride read the same elements of the kernel. So
    each of these sets of pixels is a convolution of `grads`, and the sets are interleaved. A convolution of `grads`
    with zeros between its pixels would take stride^2 times as many multiplications.
    """
    size, _, inputs, features = kernel.shape
    groups = shape[-1] // inputs
    # The transposed kernel, [k, k, F / groups, C].
    by_group = kernel.reshape(size, size, inputs, groups, features // groups)
    kernel = by_group.transpose(0, 1, 4, 3, 2).reshape(size, size, features // groups, shape[-1])
    if stride == 1 and padding < size:
        return product(grads, kernel[::-1, ::-1], stride=1, padding=size - 1 - padding)
    outputs = [-(-side // stride) for side in shape[1:3]]

    def pixels(*offsets: int) -> jax.Array:
        """Return the gradient of every pixel with these remainders, from the first."""
        firsts = [(padding + offset) % stride for offset in offsets]
        part = kernel[firsts[0] :: stride, firsts[1] :: stride][::-1, ::-1]
        if not part.size:
            # No element of the kernel reads these pixels.
            return lax.full_like(grads, 0, shape=(shape[0], *outputs, shape[3]))
        margins = []
        for axis, (offset, first) in enumerate(zip(offsets, firsts, strict=True)):
            ahead = (padding + offset - first) // stride
            margins.append((part.shape[axis] - 1 - ahead, ahead + outputs[axis] - grads.shape[1 + axis], 0))
        padded = lax.pad(grads, jnp.zeros((), grads.dtype), [(0, 0, 0), *margins, (0, 0, 0)])
        return product(padded, part, stride=1, padding=0)

    rows = [jnp.stack([pixels(row, column) for column in range(stride)], 3) for row in range(stride)]
    whole = jnp.stack(rows, 2).reshape(shape[0], outputs[0] * stride, outputs[1] * stride, shape[3])
    return whole[:, : shape[1], : shape[2]]


def _depthwise_gradient(images: jax.Array, grads: jax.Array, *, shape: Shape, stride: int, padding: int) -> jax.Array:
    """Return the gradient of a kernel of this shape, [k, k, 1, C]."""
    size, padded, (batch, height, width, channels) = shape[0], _pad(images, padding), grads.shape
    span, wide = (batch, (height - 1) * stride + 1, (width - 1) * stride + 1, channels), _total_dtype(grads)

    def tap(number: jax.Array) -> jax.Array:
        shifted = lax.dynamic_slice(padded, (0, number // size, number % size, 0), span)[:, ::stride, ::stride]
        return (shifted.astype(wide) * grads.astype(wide)).sum((0, 1, 2))

    # The sums are computed in a loop, because separate sums for all kernel elements take 1.5 s to compile.
    return lax.map(tap, jnp.arange(size * size)).reshape(shape).astype(images.dtype)


def _grouped_gradient(images: jax.Array, grads: jax.Array, *, shape: Shape, stride: int, padding: int) -> jax.Array:
    """Return the gradient of a kernel of this shape, [k, k, C / groups, F]."""
    size, _, inputs, features = shape
    groups = images.shape[-1] // inputs
    count = groups // _least_divisor(groups, inputs, _LEAST_CHANNELS)
    wide = _total_dtype(grads)

    def block(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        images, grads = part
        patches = _patches(_by_group(_pad(images, padding), count), shape, stride)
        patches = patches.reshape(count, -1, patches.shape[-1])
        by_group = grads.reshape(-1, count, features // count).transpose(1, 0, 2)
        product = lax.dot_general(patches, by_group, (((1,), (1,)), ((0,), (0,))), preferred_element_type=wide)
        return total + product, None

    # The zeros vary over the devices of a `shard_map`, like the products that are added to them.
    zeros = lax.full_like(grads, 0, wide, (count, size * size * images.shape[-1] // count, features // count))
    products, _ = lax.scan(block, zeros, (_blocks(images), _blocks(grads, like=images)))
    merged = products.reshape(count, size, size, groups // count, inputs, groups // count, features // groups)
    # The other blocks of a merged group are between different groups.
    own = jnp.diagonal(merged, axis1=3, axis2=5)
    return own.transpose(1, 2, 3, 0, 5, 4).reshape(shape).astype(images.dtype)


def _dense_gradient(images: jax.Array, grads: jax.Array, *, shape: Shape, stride: int, padding: int) -> jax.Array:
    """Return a kernel's gradient, [k, k, C, F]: the sum over pixels of the outer product of patch and gradient."""
    (batch, height, width, features), (size, _, channels, _) = grads.shape, shape
    padded = _pad(images, padding)
    if size == 1:
        pixels = _patches(padded, shape, stride).reshape(-1, channels)
        return _sum_outer_products(grads.reshape(-1, features), pixels).T.reshape(shape).astype(images.dtype)
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
    return total.reshape(shape).astype(images.dtype)


def _sum_outer_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sum the outer products of the rows: [N, A], [N, B] -> [A, B]."""
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=_total_dtype(a))


def _total_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _least_divisor(total: int, unit: int, least: int) -> int:
    """Return the smallest divisor of a total that gives at least `least` times `unit`; the total if none does."""
    enough = (size for size in range(1, total) if total % size == 0 and size * unit >= least)
    return next(enough, total)


def _block(batch: int, height: int, width: int) -> tuple[int, int]:
    """Return the number of images in a block, and the number of rows of each image.

    The block is the smallest one with enough pixels that divides the batch evenly.
    """
    return _least_divisor(batch, height * width, _BLOCK_PIXELS), _least_divisor(height, width, _BLOCK_PIXELS)


def _blocks(arrays: jax.Array, like: jax.Array | None = None) -> jax.Array:
    """Divide images into blocks, [blocks, B / blocks, H, W, C]; the size of the images `like` determines the blocks."""
    size, _ = _block(*(arrays if like is None else like).shape[:3])
    return arrays.reshape(-1, size, *arrays.shape[1:])


def _merge(kernel: jax.Array, groups: int) -> jax.Array:
    """Return the matrices of the merged groups: [k, l, inputs, F] -> [merged groups, k * l * channels, features]."""
    rows, columns, inputs, features = kernel.shape
    merged = _least_divisor(groups, inputs, _LEAST_CHANNELS)
    by_group = kernel.reshape(rows, columns, inputs, groups // merged, merged, features // groups)
    between = jnp.eye(merged, dtype=kernel.dtype)
    # The axes of the result: merged group, row, column, the input's group and channel, the output's group and feature.
    blocks = by_group.transpose(3, 0, 1, 2, 4, 5)[:, :, :, None] * between[:, None, :, None]
    return blocks.reshape(groups // merged, rows * columns * merged * inputs, -1)


def _by_group(images: jax.Array, count: int) -> jax.Array:
    """Divide the channels: [B, H, W, C] -> [count, B, H, W, C / count]."""
    return images.reshape(*images.shape[:3], count, -1).transpose(3, 0, 1, 2, 4)


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


def _patches(images: jax.Array, shape: Shape, stride: int) -> jax.Array:
    """Extract patches: [..., H, W, C] -> [..., H', W', k * l * C], in the order of a kernel [k, l, …]."""
    return jnp.concatenate([*pixels_of_windows(images, shape, stride)], -1)


# GPUs


def convolve_on_gpu(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Compute `convolve_on_cpu` to rounding.

    With a stride and few channels, blocks of pixels are convolved, without second derivatives. The kernel gets zeros
    until its side is a multiple of the stride.
    """
    blocks = stride > 1 and images.shape[-1] == kernel.shape[2] <= _FEW_ON_GPUS
    return (_convolve_blocks if blocks else _xla_convolution)(images, kernel, stride, padding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve_blocks(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    return _forward_of_blocks(images, kernel, stride, padding)[0]


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
    return _xla_convolution(
        blocks.reshape(batch, rows, columns, depth), of_blocks.reshape(length, length, depth, -1), 1, 0
    )


def _forward_of_blocks(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> tuple[jax.Array, Any]:
    # The products with the zeros do not count.
    count = _multiplications(images, kernel, stride, padding)
    product = functools.partial(_block_by_block, stride=stride, padding=padding)
    return _as_composite(product, count)(images, kernel), (images, kernel)


def _backward_of_blocks(stride: int, padding: int, saved: Any, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
    images, kernel = saved
    count = _multiplications(images, kernel, stride, padding)

    def images_gradient(grads: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda x: _block_by_block(x, kernel, stride, padding), jax.typeof(images))(grads)[0]

    def kernel_gradient(images: jax.Array, grads: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda x: _block_by_block(images, x, stride, padding), jax.typeof(kernel))(grads)[0]

    return _as_composite(images_gradient, count)(grads, kernel), _as_composite(kernel_gradient, count)(images, grads)


_convolve_blocks.defvjp(_forward_of_blocks, _backward_of_blocks)
