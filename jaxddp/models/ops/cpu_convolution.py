"""Square convolutions that are quick on CPUs, forward and backward; `jaxddp.models.adapt` says where they are used.

XLA's CPU compiler has three slow cases (times of one core, against 7 ms for a convolution of as many multiplications):

- the gradient of a kernel is a convolution with a window as large as the image, with images transposed and every patch
  laid out in memory: 10 to 24 ms;
- where the kernel is larger than the image, as a 3x3 on a 2x2 map, 725 ms;
- for the gradient of many-featured small images, the kernel is transposed first: 8 to 14 ms.

Here these are products of matrices, with an image's patches as rows. A product also multiplies the padding, which a
convolution does not, so each is a `composite` that says how many multiplications the convolution has.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxddp.models.ops.cpu_depthwise as cpu_depthwise

# A patch copies each value k * k times, for as many products as there are features on the other side. From so many on
# the copies are cheaper than what they save (measured: 128 to 512 features, maps of 2x2 to 14x14).
_MANY_FEATURES = 256
# Rows of patches that are multiplied at once, so that they stay in a core's cache: 11 ms in place of 28 in one piece.
_BLOCK_PIXELS = 256
# Of channels times features, from here on, and of channels, below: patches are transposed before they are multiplied.
_LARGE_KERNEL, _FEW_CHANNELS = 1 << 18, 16


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolve(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    """Cross-correlation of [B, H, W, C] with [k, k, C, F]: [B, H', W', F], H' = (H + 2 padding - k) // stride + 1.

    With a kernel [k, k, 1, C] and stride 1 it is depthwise: [B, H', W', C]. Any float dtype; a kernel's gradient is
    summed in float32 at least. Differentiable in reverse mode.

    Args:
        stride, padding: of both axes; the padding is of zeros, on either side.
    """
    if cpu_depthwise.is_depthwise(images, kernel, stride):
        product = functools.partial(cpu_depthwise.depthwise, padding=padding)
        return _marked(product, _multiplications(images, kernel, stride, padding))(images, kernel)
    if not _multiplies(images, kernel, kernel.shape[3]):
        return _library(images, kernel, stride, padding)
    product = functools.partial(_product, stride=stride, padding=padding)
    return _marked(product, _multiplications(images, kernel, stride, padding))(images, kernel)


def _forward(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> tuple[jax.Array, Any]:
    return convolve(images, kernel, stride, padding), (images, kernel)


def _backward(stride: int, padding: int, saved: Any, grads: jax.Array) -> tuple[jax.Array, jax.Array]:
    images, kernel = saved
    settings, size = {"stride": stride, "padding": padding}, kernel.shape[0]
    count = _multiplications(images, kernel, stride, padding)
    if cpu_depthwise.is_depthwise(images, kernel, stride):
        of_kernel = functools.partial(cpu_depthwise.kernel_gradient, padding=padding, size=size)
        of_images = functools.partial(cpu_depthwise.images_gradient, padding=padding)
        return _marked(of_images, count)(grads, kernel), _marked(of_kernel, count)(images, grads)

    def images_gradient(convolution: Callable[..., jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
        like = jax.typeof(images)
        return lambda grads, kernel: jax.linear_transpose(lambda x: convolution(x, kernel, **settings), like)(grads)[0]

    of_kernel = _pixels_product if size == 1 else functools.partial(_blocks_product, size=size)
    kernel_gradient = _marked(functools.partial(of_kernel, **settings), count)
    # The library's is one over the output, so a stride to a 2x2 map makes it slow too: 4.2 ms in place of 0.5.
    multiplies = _multiplies(grads, kernel, kernel.shape[2])
    of_images = _marked(images_gradient(_product), count) if multiplies else images_gradient(_library)
    return of_images(grads, kernel), kernel_gradient(images, grads)


convolve.defvjp(_forward, _backward)


def _marked(product: Callable[[jax.Array, jax.Array], jax.Array], multiplications: int) -> Callable[..., jax.Array]:
    composite = lax.composite(lambda a, b, **_: product(a, b), "jaxddp.convolution")
    return functools.partial(composite, multiplications=np.int64(multiplications))


def _multiplications(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> int:
    """Those of a convolution with pixels, and not with padding; its two gradients have as many."""
    batch, *sides, _ = images.shape
    size, _, channels, features = kernel.shape

    def taps(side: int) -> int:
        outputs = (side + 2 * padding - size) // stride + 1
        at = stride * np.arange(outputs)[:, None] + np.arange(size) - padding
        return int(((at >= 0) & (at < side)).sum())

    return batch * channels * features * math.prod(map(taps, sides))


def _multiplies(images: jax.Array, kernel: jax.Array, features: int) -> bool:
    """Whether a product of matrices is the quicker way from these to so many `features`, on a CPU."""
    size = kernel.shape[0]
    smallest = min(images.shape[1:3])
    return size == 1 or smallest < size or features >= _MANY_FEATURES


def _library(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    margins = ((padding, padding), (padding, padding))
    return lax.conv_general_dilated(
        images, kernel, (stride, stride), margins, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _product(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    size, _, channels, features = kernel.shape
    patches = _patches(_padded(images, padding), size, stride)
    rows = patches.reshape(-1, size * size * channels) @ kernel.reshape(-1, features)
    return rows.reshape(*patches.shape[:3], features)


def _pixels_product(images: jax.Array, grads: jax.Array, stride: int, padding: int) -> jax.Array:
    """[1, 1, C, F], a 1x1 kernel's gradient: the sum over all pixels of their outer product with their gradient."""
    channels, features = images.shape[-1], grads.shape[-1]
    pixels = _patches(_padded(images, padding), 1, stride).reshape(-1, channels)
    return _summed(grads.reshape(-1, features), pixels).T.reshape(1, 1, channels, features).astype(images.dtype)


def _blocks_product(images: jax.Array, grads: jax.Array, size: int, stride: int, padding: int) -> jax.Array:
    """[k, k, C, F], a kernel's gradient: the sum over all pixels of a patch's outer product with its gradient."""
    batch, height, width, features = grads.shape
    padded = _padded(images, padding)
    channels = images.shape[-1]
    transposed = channels * features >= _LARGE_KERNEL or channels < _FEW_CHANNELS
    count, rows = _block(batch, height, width)
    span, blocks_an_image = (rows - 1) * stride + 1, height // rows

    def product(patch_rows: jax.Array, own: jax.Array) -> jax.Array:
        if transposed:
            # The barrier has them transposed in memory: the library is slow to do so while it multiplies.
            laid_out = lax.optimization_barrier(patch_rows.T)
            return jnp.matmul(laid_out, own, preferred_element_type=_total_dtype(own))
        # The longer side last, which is that of the patches.
        return _summed(own, patch_rows)

    def block(number: jax.Array | int) -> list[jax.Array]:
        """For each row of the kernel, [k * C, F] or its transpose."""
        image, row = number // blocks_an_image * count, number % blocks_an_image * rows
        corner = (image * padded.shape[1] + row * stride) * padded.shape[2]
        found = _patch_rows(padded, corner, (count, span + size - 1, width), size, stride)
        own = lax.dynamic_slice(grads, (image, row, 0, 0), (count, rows, width, features)).reshape(-1, features)
        met = (found[:, first : first + span : stride] for first in range(size))
        return [product(each.reshape(-1, size * channels), own) for each in met]

    # Zeros made of the gradients, so that inside of a `shard_map` they vary over its devices as what is added does.
    zeros = [lax.full_like(grads, 0, like.dtype, like.shape) for like in jax.eval_shape(block, 0)]
    totals = lax.fori_loop(
        0, batch // count * blocks_an_image, lambda number, totals: jax.tree.map(jnp.add, totals, block(number)), zeros
    )
    total = jnp.stack(totals if transposed else [each.T for each in totals])
    return total.reshape(size, size, channels, features).astype(images.dtype)


def _summed(a: jax.Array, b: jax.Array) -> jax.Array:
    """[N, A], [N, B] -> [A, B]: the sum of the rows' outer products."""
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=_total_dtype(a))


def _total_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _block(batch: int, height: int, width: int) -> tuple[int, int]:
    """(images, rows of each) in a block: the fewest that divide all evenly and have enough pixels."""
    pixels = height * width
    if pixels >= _BLOCK_PIXELS:
        return 1, next(rows for rows in range(1, height + 1) if height % rows == 0 and rows * width >= _BLOCK_PIXELS)
    counts = (count for count in range(1, batch) if batch % count == 0 and count * pixels >= _BLOCK_PIXELS)
    return next(counts, batch), height


def _patch_rows(padded: jax.Array, corner: jax.Array | int, part: tuple[int, int, int], size: int, stride: int) -> Any:
    """A patch's rows, for every row of a part of the images: [images, rows, W', k * C].

    `corner` is where the part, (images, rows, W'), begins among all pixels. A row of an image is in as many patches as
    the kernel has rows, and is copied once for all of them; one gather is quicker than a slice for each column.
    """
    channels = padded.shape[-1]
    image, row, column, tap = np.ogrid[: part[0], : part[1], : part[2] * stride : stride, :size]
    pixels = (((image * padded.shape[1]) + row) * padded.shape[2] + column + tap).astype(np.int32).reshape(-1)
    found = padded.reshape(-1, channels).at[pixels + corner].get(mode="promise_in_bounds")
    return found.reshape(*part, size * channels)


def _padded(images: jax.Array, padding: int) -> jax.Array:
    return jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))


def _patches(images: jax.Array, size: int, stride: int) -> jax.Array:
    """[B, H, W, C] -> [B, H', W', k * k * C], rows first, as a kernel's values lie in memory."""
    height, width = ((length - size) // stride * stride + 1 for length in images.shape[1:3])
    taps = [images[:, i : i + height : stride, j : j + width : stride] for i in range(size) for j in range(size)]
    return jnp.concatenate(taps, -1)
