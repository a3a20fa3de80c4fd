"""The implementations of a network's operations. They differ in speed from platform to platform, not in their values.

`jaxddp.platforms` selects the implementations of a platform.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import flax.linen as nn
import jax

import jaxddp.models.ops.max_pool as indexed

# Type checkers do not accept a `jax.custom_vjp` as a callable.
Convolution: TypeAlias = Any
"""(images [B, H, W, C], kernel [k, k, C, F], stride, padding) -> [B, H', W', F]."""
MaxPool: TypeAlias = Any
"""(images [B, H, W, C], window, stride, padding) -> [B, H', W', C]."""


def flax_max_pool(images: jax.Array, window: int = 3, stride: int = 2, padding: int = 1) -> jax.Array:
    """Take the maximum over square windows by `flax.linen.max_pool`, whose gradient is XLA's select and scatter."""
    # Flax annotates paddings as a string.
    margins: Any = ((padding, padding), (padding, padding))
    return nn.max_pool(images, (window, window), (stride, stride), margins)


@dataclass(frozen=True)
class Operations:
    """The implementations that a network uses.

    Attributes:
        convolution: the function that computes convolutions; None for Flax's default.
        grouped_convolution: the function with the arguments of `lax.conv_general_dilated` that computes convolutions in
            groups of channels in networks of users; None for Flax's default.
        max_pool: the function that computes max pooling.
        custom_norm_gradient: whether batch norms use the custom gradient of `jaxddp.models.ops.batch_norm`.
    """

    convolution: Convolution | None = None
    grouped_convolution: Convolution | None = None
    max_pool: MaxPool = indexed.max_pool
    custom_norm_gradient: bool = True

    def conv_general_dilated(self, stride: int, padding: int) -> Callable[..., jax.Array] | None:
        """Return the argument `conv_general_dilated` of `flax.linen.Conv` for one stride and padding."""
        convolution = self.convolution
        if convolution is None:
            return None
        return lambda images, kernel, *_, **__: convolution(images, kernel, stride, padding)
