"""How a ResNet begins: two stems."""

from collections.abc import Callable

import jax

from jaxddp.models.ops.max_pool import max_pool

ModuleFactory = Callable[..., Callable[..., jax.Array]]
"""Its result is called with images: a module, or a function that calls one."""


def imagenet_stem(images: jax.Array, features: int, conv: ModuleFactory, norm: ModuleFactory) -> jax.Array:
    """7x7 convolution and 3x3 maximum, each of stride 2: [B, H, W, C] -> [B, H/4, W/4, features]."""
    x = conv(features, kernel=7, stride=2, name="conv1")(images)
    return max_pool(norm(name="bn1")(x, relu=True))


def small_stem(images: jax.Array, features: int, conv: ModuleFactory, norm: ModuleFactory) -> jax.Array:
    """3x3 convolution that keeps every pixel, for images of some 32 pixels: [B, H, W, C] -> [B, H, W, features]."""
    return norm(name="bn1")(conv(features, kernel=3, stride=1, name="conv1")(images), relu=True)


STEMS = {"imagenet": imagenet_stem, "small": small_stem}
