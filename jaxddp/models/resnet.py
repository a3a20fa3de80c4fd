"""Residual networks for image classification: ResNet-10, 18, 34, 50, 101 and 152, in Flax Linen.

A network is data: four stage sizes and the convolutions of one block (`ARCHITECTURES`). Everything else here says once
what all of them share.

Sources: He et al. 2015, "Deep residual learning for image recognition" (arXiv:1512.03385); the "v1.5" bottleneck, which
strides on its 3x3 convolution, and the explicit paddings are those of github.com/facebookarchive/fb.resnet.torch;
zero-initialized last scales and the head's initializer are from Goyal et al. 2017 (arXiv:1706.02677, section 5.1);
ResNet-10, one block a stage, for what is small, as in Chen et al. 2019 (arXiv:1904.04232).
Parameters carry torchvision's names and mean the same: `layer1.0.conv1.weight` is `layer1_0/conv1/kernel`, transposed
from OIHW to HWIO, and `downsample.0` and `.1` are `downsample_conv` and `downsample_bn`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxddp.errors import InputError
from jaxddp.models.convolution import convolve
from jaxddp.wording import choices

T = TypeVar("T")
ModuleFactory = Callable[..., nn.Module]

# torchvision's momentum of 0.1 weighs the new batch; Flax's 0.9 weighs the old average: the same rule.
BATCH_NORM_MOMENTUM = 0.9
BATCH_NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class Convolution:
    """One convolution of a block: `kernel` pixels square, `expansion` times the block's features, strided or not."""

    kernel: int
    expansion: int = 1
    strided: bool = False


@dataclass(frozen=True)
class Architecture:
    """What tells one ResNet from another: the number of blocks in each of four stages, and the block."""

    stage_sizes: tuple[int, ...]
    block: tuple[Convolution, ...]


BASIC = (Convolution(3, strided=True), Convolution(3))
BOTTLENECK = (Convolution(1), Convolution(3, strided=True), Convolution(1, expansion=4))

ARCHITECTURES = {
    "resnet10": Architecture((1, 1, 1, 1), BASIC),
    "resnet18": Architecture((2, 2, 2, 2), BASIC),
    "resnet34": Architecture((3, 4, 6, 3), BASIC),
    "resnet50": Architecture((3, 4, 6, 3), BOTTLENECK),
    "resnet101": Architecture((3, 4, 23, 3), BOTTLENECK),
    "resnet152": Architecture((3, 8, 36, 3), BOTTLENECK),
}

WEIGHT_INITS = {
    "he_normal": nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
    "he_uniform": nn.initializers.variance_scaling(2.0, "fan_out", "uniform"),
    "xavier_normal": nn.initializers.variance_scaling(1.0, "fan_avg", "normal"),
    "xavier_uniform": nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
    "lecun_normal": nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal"),
    "orthogonal": nn.initializers.orthogonal(2.0**0.5),
}


def max_pool(images: jax.Array, *, window: int = 3, stride: int = 2, padding: int = 1) -> jax.Array:
    """Maximum over square windows, [B, H, W, C] -> [B, ceil(H/2), ceil(W/2), C] by default, any float dtype.

    A square's maximum is the maximum over columns of the maximum over rows, each a maximum of shifted slices. XLA fuses
    those, where the gradient of `nn.max_pool` (select and scatter) is a slow serial loop on CPUs. Where several pixels
    tie for the maximum, they share the gradient; `nn.max_pool` gives all of it to the first.
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
BATCH_NORM_AXES = {"local": None, "sync": "data"}


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + f(x)), where f is the block's convolutions, each with its batch norm.

    Attributes:
        convolutions: what f is made of; the first `strided` one carries the block's stride.
        features: of the narrow convolutions; the output has `features` times the last one's expansion.
        stride: 1, or 2 to halve height and width.
        zero_init_last_scale: start as the identity, by a last scale of zero.
        conv, norm: factories of layers that already know their dtypes and mode.
    """

    convolutions: tuple[Convolution, ...]
    features: int
    stride: int
    zero_init_last_scale: bool
    conv: ModuleFactory
    norm: ModuleFactory

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y, last = x, len(self.convolutions)
        for i, convolution in enumerate(self.convolutions, start=1):
            features = self.features * convolution.expansion
            stride = self.stride if convolution.strided else 1
            y = self.conv(features, kernel=convolution.kernel, stride=stride, name=f"conv{i}")(y)
            if i < last:
                y = nn.relu(self.norm(name=f"bn{i}")(y))
        scale_init = nn.initializers.zeros if self.zero_init_last_scale else nn.initializers.ones
        y = self.norm(name=f"bn{last}", scale_init=scale_init)(y)

        if x.shape != y.shape:
            x = self.conv(y.shape[-1], kernel=1, stride=self.stride, name="downsample_conv")(x)
            x = self.norm(name="downsample_bn")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A residual network; `resnet` builds one by name.

    Attributes:
        architecture: stage sizes and block.
        num_classes: number of logits.
        width: features of the stem and of the first stage's narrow convolutions; each later stage doubles it.
        stem: one of `STEMS`' functions.
        kernel_init: initializer of the convolutions.
        zero_init_last_scale: every block starts as the identity.
        axis_name: mesh axis over which training averages batch statistics; None keeps them local to a device.
        dtype: of the computation. The mean over pixels and the head stay in float32 at least.
        param_dtype: of parameters and running statistics (float64 for proofs, under x64).
    """

    architecture: Architecture
    num_classes: int
    width: int = 64
    stem: Callable[..., jax.Array] = imagenet_stem
    kernel_init: nn.initializers.Initializer = WEIGHT_INITS["he_normal"]
    zero_init_last_scale: bool = True
    axis_name: str | None = None
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Normalized images [B, H, W, C] -> logits [B, num_classes], float32 (float64 where `dtype` is).

        `train` normalizes by the batch's statistics and updates the running ones in the collection `batch_stats`, with
        the biased variance, as Flax does (torch's running variance is the unbiased one).
        """
        conv, norm = self.layers(train)
        x = self.stem(images.astype(self.dtype), self.width, conv, norm)
        for stage, blocks in enumerate(self.architecture.stage_sizes):
            for block in range(blocks):
                x = ResidualBlock(
                    self.architecture.block,
                    features=self.width * 2**stage,
                    stride=2 if stage > 0 and block == 0 else 1,
                    zero_init_last_scale=self.zero_init_last_scale,
                    conv=conv,
                    norm=norm,
                    name=f"layer{stage + 1}_{block}",
                )(x)
        head_dtype = jnp.promote_types(self.dtype, jnp.float32)
        x = jnp.mean(x, axis=(1, 2), dtype=head_dtype)
        head_init = nn.initializers.normal(0.01)
        return nn.Dense(self.num_classes, True, head_dtype, self.param_dtype, kernel_init=head_init, name="fc")(x)

    def layers(self, train: bool) -> tuple[ModuleFactory, ModuleFactory]:
        """The factories of all convolutions and of all batch norms."""
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        conv = functools.partial(_conv, kernel_init=self.kernel_init, **dtypes)
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=BATCH_NORM_MOMENTUM,
            epsilon=BATCH_NORM_EPSILON,
            axis_name=self.axis_name,
            # Flax's floor of float32 for statistics is also the dtype they start in: too narrow for float64.
            force_float32_reductions=jnp.dtype(self.param_dtype) != jnp.float64,
            **dtypes,
        )
        return conv, norm


def _conv(features: int, *, kernel: int, stride: int, **settings: Any) -> nn.Conv:
    """A square convolution without bias; its padding is torch's, symmetric whatever the stride, unlike "SAME"."""

    def operation(images: jax.Array, weights: jax.Array, *_: Any, **__: Any) -> jax.Array:
        return convolve(images, weights, stride, kernel // 2)

    return nn.Conv(features, (kernel, kernel), stride, use_bias=False, conv_general_dilated=operation, **settings)


def resnet(
    name: str,
    num_classes: int,
    *,
    width: int = 64,
    stem: str = "imagenet",
    batch_norm: str = "local",
    zero_init_last_scale: bool = True,
    weight_init: str = "he_normal",
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
) -> ResNet:
    """Builds a ResNet from names and numbers, as a config holds them.

    Args:
        name: one of `ARCHITECTURES`, such as "resnet50".
        num_classes: number of logits.
        width: features of the stem; 64 is the published network.
        stem: "imagenet" (7x7 of stride 2, max-pool) or "small" (3x3 of stride 1, no pool).
        batch_norm: "local" (each device its own batch statistics) or "sync" (over the mesh axis "data"; such a network
            trains only inside a `shard_map` that has this axis).
        zero_init_last_scale: every block starts as the identity.
        weight_init: one of `WEIGHT_INITS`, for the convolutions.
        dtype: of the computation; parameters and statistics stay in `param_dtype`.
        param_dtype: of the parameters.

    Raises:
        InputError: a name is unknown (the message says the nearest right one), or a number is not positive.
    """
    for key, value in (("num_classes", num_classes), ("width", width)):
        if value < 1:
            raise InputError(f"{name}: {key} is {value}; give a positive number")
    return ResNet(
        architecture=_lookup("model", name, ARCHITECTURES),
        num_classes=num_classes,
        width=width,
        stem=_lookup("stem", stem, STEMS),
        kernel_init=_lookup("weight_init", weight_init, WEIGHT_INITS),
        zero_init_last_scale=zero_init_last_scale,
        axis_name=_lookup("batch_norm", batch_norm, BATCH_NORM_AXES),
        dtype=dtype,
        param_dtype=param_dtype,
    )


def _lookup(key: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise InputError(f"unknown {key} {name!r}; {choices(str(name), known)}")
    return known[name]
