"""Convolutions in groups of channels for CPUs, as products of matrices, one for each group.

XLA's CPU compiler computes the gradient of a grouped kernel as a convolution for each pair of channels.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# Groups with fewer channels are merged, with zeros between them. The products then have more multiplications, but
# matrices with few columns are slow.
_LEAST_CHANNELS = 16
# The number of pixels whose patches are multiplied at once, so that the patches fit in a core's cache.
_BLOCK_PIXELS = 256


def is_grouped(images: jax.Array, kernel: jax.Array) -> bool:
    """Return whether a convolution has several groups: a kernel [k, k, C / groups, F] for images [B, H, W, C]."""
    return kernel.shape[2] < images.shape[-1]


def product(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Convolve [B, H, W, C] with [k, l, C / groups, F]: [B, H', W', F], H' = (H + 2 padding - k) // stride + 1."""
    matrices = _merge(kernel, images.shape[-1] // kernel.shape[2])
    count = len(matrices)

    def block(images: jax.Array) -> jax.Array:
        patches = _patches(images, count, kernel.shape, stride, padding)
        rows = lax.dot_general(patches.reshape(count, -1, patches.shape[-1]), matrices, (((2,), (1,)), ((0,), (0,))))
        return rows.reshape(*patches.shape[:-1], -1).transpose(1, 2, 3, 0, 4).reshape(*patches.shape[1:4], -1)

    results = lax.map(block, _blocks(images))
    return results.reshape(len(images), *results.shape[2:])


def images_gradient(
    grads: jax.Array, kernel: jax.Array, shape: tuple[int, ...], stride: int, padding: int
) -> jax.Array:
    """Compute the gradient of the images, the transposed convolution: [B, H', W', F] -> [B, H, W, C]."""
    size, _, inputs, features = kernel.shape
    groups = shape[-1] // inputs
    # The transposed kernel, [k, k, F / groups, C].
    by_group = kernel.reshape(size, size, inputs, groups, features // groups)
    swapped = by_group.transpose(0, 1, 4, 3, 2).reshape(size, size, features // groups, shape[-1])
    if stride == 1:
        return product(grads, swapped[::-1, ::-1], 1, size - 1 - padding)
    valid = functools.partial(product, stride=1, padding=0)
    return strided_images_gradient(valid, grads, swapped, shape, stride, padding)


def kernel_gradient(
    images: jax.Array, grads: jax.Array, shape: tuple[int, ...], stride: int, padding: int
) -> jax.Array:
    """Compute the gradient of the kernel, whose shape is [k, k, C / groups, F], summed in float32 or wider."""
    size, _, inputs, features = shape
    groups = images.shape[-1] // inputs
    count = groups // _merged(groups, inputs)
    wide = jnp.promote_types(grads.dtype, jnp.float32)

    def block(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        images, grads = part
        patches = _patches(images, count, shape, stride, padding)
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
    return own.transpose(1, 2, 3, 0, 5, 4).reshape(size, size, inputs, features).astype(images.dtype)


def _merged(groups: int, inputs: int) -> int:
    """Return the number of groups to merge: the smallest divisor that gives enough channels."""
    return next(
        size
        for size in range(1, groups + 1)
        if groups % size == 0 and (size * inputs >= _LEAST_CHANNELS or size == groups)
    )


def _merge(kernel: jax.Array, groups: int) -> jax.Array:
    """Return the matrices of the merged groups: [k, l, inputs, F] -> [merged groups, k * l * channels, features]."""
    rows, columns, inputs, features = kernel.shape
    merged = _merged(groups, inputs)
    by_group = kernel.reshape(rows, columns, inputs, groups // merged, merged, features // groups)
    between = jnp.eye(merged, dtype=kernel.dtype)
    # The axes of the result: merged group, row, column, the input's group and channel, the output's group and feature.
    blocks = by_group.transpose(3, 0, 1, 2, 4, 5)[:, :, :, None] * between[:, None, :, None]
    return blocks.reshape(groups // merged, rows * columns * merged * inputs, -1)


def _patches(images: jax.Array, count: int, shape: tuple[int, ...], stride: int, padding: int) -> jax.Array:
    """Extract the patches of each merged group: [B, H, W, C] -> [count, B, H', W', k * l * C / count].

    Args:
        shape: the shape of the kernel, [k, l, ...].
    """
    batch, height, width, channels = images.shape
    by_group = images.reshape(batch, height, width, count, channels // count).transpose(3, 0, 1, 2, 4)
    padded = jnp.pad(by_group, ((0, 0), (0, 0), (padding, padding), (padding, padding), (0, 0)))
    rows, columns = (side + 2 * padding - size + 1 for side, size in zip((height, width), shape[:2], strict=True))
    taps = [
        padded[:, :, i : i + rows : stride, j : j + columns : stride] for i in range(shape[0]) for j in range(shape[1])
    ]
    return jnp.concatenate(taps, -1)


def _blocks(arrays: jax.Array, like: jax.Array | None = None) -> jax.Array:
    """Divide images into blocks: [B, H, W, C] -> [blocks, B / blocks, H, W, C].

    Args:
        like: images whose size determines the blocks, by default those that are divided.
    """
    batch, height, width, _ = (arrays if like is None else like).shape
    size = next(
        (size for size in range(1, batch) if batch % size == 0 and size * height * width >= _BLOCK_PIXELS), batch
    )
    return arrays.reshape(batch // size, size, *arrays.shape[1:])


def strided_images_gradient(
    convolve: Callable[[jax.Array, jax.Array], jax.Array],
    grads: jax.Array,
    kernel: jax.Array,
    shape: tuple[int, ...],
    stride: int,
    padding: int,
) -> jax.Array:
    """Compute the gradient of images [B, H, W, C] from that of the result, [B, H', W', F].

    The pixels whose rows and columns have the same remainders by the stride read the same elements of the kernel. So
    each of these groups of pixels is a convolution of `grads`, and the groups are interleaved. A convolution of `grads`
    with zeros between its pixels would take stride^2 times as many multiplications.

    Args:
        convolve: a convolution without padding and with stride 1, of images and a kernel.
        kernel: the kernel, [k, k, ...], whose last two axes are in the order that `convolve` takes for `grads`.
        shape: the shape of the images.
        stride: the stride of both axes.
        padding: the number of zeros on each side of both axes.
    """
    zero = jnp.zeros((), grads.dtype)

    def pixels(row: int, column: int) -> jax.Array:
        """Return the gradient of every pixel with these remainders, from the first."""
        firsts = [(padding + offset) % stride for offset in (row, column)]
        part = kernel[firsts[0] :: stride, firsts[1] :: stride][::-1, ::-1]
        if not part.size:
            # No element of the kernel reads these pixels.
            sides = (-(-side // stride) for side in shape[1:3])
            return lax.full_like(grads, 0, shape=(shape[0], *sides, shape[3]))
        margins = []
        for offset, first, size, side, outputs in zip(
            (row, column), firsts, part.shape, shape[1:3], grads.shape[1:3], strict=False
        ):
            ahead = (padding + offset - first) // stride
            margins.append((size - 1 - ahead, ahead + -(-side // stride) - outputs, 0))
        return convolve(lax.pad(grads, zero, [(0, 0, 0), *margins, (0, 0, 0)]), part)

    rows = [jnp.stack([pixels(row, column) for column in range(stride)], 3) for row in range(stride)]
    whole = jnp.stack(rows, 2)
    batch, height, _, width, _, channels = whole.shape
    return whole.reshape(batch, height * stride, width * stride, channels)[:, : shape[1], : shape[2]]
