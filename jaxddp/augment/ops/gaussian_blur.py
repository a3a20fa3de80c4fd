"""Gaussian blur by Pillow's method, three box blurs along each axis.

The method is that of Gwosdek et al. 2011, "Theoretical foundations of Gaussian convolution by extended box filtering".
"""

import jax
import jax.numpy as jnp
import numpy as np

PASSES = 3
_HALF = 1 << 23
_WHOLE = 1 << 24
"""The unit of a weight in Pillow."""


def box_weights(radius: float) -> tuple[int, int, int]:
    """Return the weights of the pixels at distances 0, 1 and 2 in one box blur, in units of 1/2**24.

    The box has the variance radius**2 / 3, so three blurs have the variance of the Gaussian. The outermost pixels have
    a smaller weight than the others, because the radius of the box is not a whole number.

    Args:
        radius: the standard deviation of the Gaussian in pixels, up to 2.4.
    """
    variance = radius * radius / PASSES
    whole = int(np.floor((np.sqrt(12 * variance + 1) - 1) / 2))
    rest = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) ** 2))
    inner = int(_WHOLE / (2 * (whole + rest) + 1))
    outer = (_WHOLE - (2 * whole + 1) * inner) // 2
    return (inner, outer, 0) if whole == 0 else (inner, inner, outer)


def blur(planes: jax.Array, weights: jax.Array) -> jax.Array:
    """Blur uint8[C, H, W]. Pixels outside the image have the value of the nearest border.

    Args:
        weights: uint32[3]; see `box_weights`.
    """
    for axis in (2, 1):
        for _ in range(PASSES):
            planes = _box_blur(planes, weights, axis)
    return planes


def _box_blur(planes: jax.Array, weights: jax.Array, axis: int) -> jax.Array:
    size = planes.shape[axis]
    margins = [(2, 2) if each == axis else (0, 0) for each in range(3)]
    padded = jnp.pad(planes, margins, mode="edge").astype(jnp.uint32)
    shifted = [jax.lax.slice_in_dim(padded, start, start + size, axis=axis) for start in range(5)]
    middle, near, far = shifted[2], shifted[1] + shifted[3], shifted[0] + shifted[4]
    # The largest sum is 255.5 * 2**24, which fits into 32 bits.
    total = weights[0] * middle + weights[1] * near + weights[2] * far + _HALF
    return (total // _WHOLE).astype(planes.dtype)
