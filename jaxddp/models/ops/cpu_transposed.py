"""The gradient of a strided convolution's images on CPUs, as convolutions without a stride."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def images_gradient(
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
