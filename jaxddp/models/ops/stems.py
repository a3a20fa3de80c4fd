"""The stems of a ResNet: its layers before the first block."""

import jax

from jaxddp.models.ops.conv_norm import ModuleFactory
from jaxddp.models.ops.operations import MaxPool


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


def deep_stem(
    images: jax.Array, features: int, conv: ModuleFactory, norm: ModuleFactory, max_pool: MaxPool
) -> jax.Array:
    """Apply three 3x3 convolutions, the first with stride 2, and the max pool: [B, H, W, C] -> [B, H/4, W/4, features].

    Source: He et al. 2019, "Bag of tricks for image classification" (arXiv:1812.01187), ResNet-C.
    """
    x = images
    for number, stride in ((1, 2), (2, 1)):
        x = conv(max(1, features // 2), kernel=3, stride=stride, name=f"stem_conv{number}")(x)
        x = norm(name=f"stem_bn{number}")(x, relu=True)
    x = conv(features, kernel=3, stride=1, name="stem_conv3")(x)
    return max_pool(norm(name="bn1")(x, relu=True), 3, 2, 1)


STEMS = {"imagenet": imagenet_stem, "small": small_stem, "deep": deep_stem}
