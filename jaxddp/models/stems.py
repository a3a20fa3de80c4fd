"""How a ResNet begins: two stems, and the maximum that one of them takes."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

ModuleFactory = Callable[..., nn.Module]


def max_pool(images: jax.Array, *, window: int = 3, stride: int = 2, padding: int = 1) -> jax.Array:
    """Maximum over square windows, [B, H, W, C] -> [B, ceil(H/2), ceil(W/2), C] by default, any float dtype.

    It is the maximum over columns of the maximum over rows, each of shifted slices, which XLA fuses; the gradient of
    `nn.max_pool` (select and scatter) is a slow serial loop on CPUs. Where several pixels tie for the maximum, they
    share the gradient; `nn.max_pool` gives all of it to the first.
    """
    for axis in (1, 2):
        margins = [(padding, padding, 0) if i == axis else (0, 0, 0) for i in range(images.ndim)]
        padded = lax.pad(images, jnp.array(-jnp.inf, images.dtype), margins)
        last = padded.shape[axis] - window
        shifted = (lax.slice_in_dim(padded, k, last + k + 1, stride, axis) for k in range(window))
        images = functools.reduce(jnp.maximum, shifted)
    return images


def imagenet_stem(images: jax.Array, features: int, conv: ModuleFactory, norm: ModuleFactory) -> jax.Array:
    """7x7 convolution and 3x3 maximum, each of stride 2: [B, H, W, C] -> [B, H/4, W/4, features]."""
    x = conv(features, kernel=7, stride=2, name="conv1")(images)
    return max_pool(nn.relu(norm(name="bn1")(x)))


def small_stem(images: jax.Array, features: int, conv: ModuleFactory, norm: ModuleFactory) -> jax.Array:
    """3x3 convolution that keeps every pixel, for images of some 32 pixels: [B, H, W, C] -> [B, H, W, features]."""
    return nn.relu(norm(name="bn1")(conv(features, kernel=3, stride=1, name="conv1")(images)))


STEMS = {"imagenet": imagenet_stem, "small": small_stem}
