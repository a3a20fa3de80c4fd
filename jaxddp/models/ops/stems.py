"""The stems of a ResNet: its layers before the first block."""

from collections.abc import Callable

import jax

from jaxddp.models.ops.operations import MaxPool

ModuleFactory = Callable[..., Callable[..., jax.Array]]
"""A function that returns a module, or a function of images that calls a module."""


def imagenet_stem(
    images: jax.Array, features: int, conv: ModuleFactory, norm: ModuleFactory, max_pool: MaxPool
) -> jax.Array:
    """Apply a 7x7 convolution and a 3x3 max pool, each with stride 2: [B, H, W, C] -> [B, H/4, W/4, features]."""
    x = conv(features, kernel=7, stride=2, name="conv1")(images)
    return max_pool(norm(name="bn1")(x, relu=True), 3, 2, 1)


def small_stem(
    images: jax.Array, features: int, conv: ModuleFactory, norm: ModuleFactory, max_pool: MaxPool
) -> jax.Array:
    """Apply a 3x3 convolution with stride 1, for images of about 32 pixels: [B, H, W, C] -> [B, H, W, features]."""
    return norm(name="bn1")(conv(features, kernel=3, stride=1, name="conv1")(images), relu=True)


STEMS = {"imagenet": imagenet_stem, "small": small_stem}
