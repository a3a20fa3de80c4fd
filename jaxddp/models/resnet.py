"""Residual networks for image classification: ResNet-10, 18, 34, 50, 101 and 152, in Flax Linen.

Sources: He et al. 2015, "Deep residual learning for image recognition" (arXiv:1512.03385). The "v1.5" bottleneck, whose
3x3 convolution has the stride, and the explicit paddings are from github.com/facebookarchive/fb.resnet.torch. The
zero-initialized last scales and the head's initializer are from Goyal et al. 2017 (arXiv:1706.02677, section 5.1).
ResNet-10, with one block in each stage, is from Chen et al. 2019 (arXiv:1904.04232). `TORCHVISION` maps parameters to
the names in torchvision and timm.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxddp.choices import settings_of
from jaxddp.config import Config, ModelConfig
from jaxddp.core.errors import InputError
from jaxddp.models.ops.batch_norm import BatchNorm
from jaxddp.models.ops.blur import blurring
from jaxddp.models.ops.operations import Operations
from jaxddp.models.ops.stems import STEMS, ModuleFactory, imagenet_stem
from jaxddp.models.published import Naming, depth_of, naming
from jaxddp.models.settings import WEIGHT_INITS, check_floating, kernel_init, lookup
from jaxddp.registry import MODELS
from jaxddp.sections.model_section import Stem, Width


@dataclass(frozen=True)
class Convolution:
    """One convolution of a block.

    Attributes:
        kernel: the side of the kernel.
        expansion: the number of features, as a multiple of the block's `features`.
        strided: whether this convolution has the block's stride.
    """

    kernel: int
    expansion: int = 1
    strided: bool = False


@dataclass(frozen=True)
class Architecture:
    """The architecture of a ResNet: the number of blocks in each of four stages, and the convolutions of a block."""

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

TORCHVISION = naming(
    (r"(layer\d)_(\d+)", r"\1.\2"), ("downsample_conv", "downsample.0"), ("downsample_bn", "downsample.1")
)


class ResidualBlock(nn.Module):
    """A residual block, relu(shortcut(x) + f(x)), where f is the block's convolutions, each with a batch norm.

    Attributes:
        convolutions: the convolutions of f; a `strided` one has the block's stride.
        features: the number of features of a convolution with expansion 1. The output has `features` times the last
            expansion.
        stride: 1, or 2 to halve the height and the width.
        zero_init_last_scale: initialize the last scale to zero, so that the block starts as the identity.
        conv, norm: factories of the layers; see `ResNet.layers`.
        shortcut_norm: whether a shortcut that changes the shape has a batch norm after its convolution. Otherwise the
            convolution has a bias.
    """

    convolutions: tuple[Convolution, ...]
    features: int
    stride: int
    zero_init_last_scale: bool
    conv: ModuleFactory
    norm: ModuleFactory
    shortcut_norm: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y, last = x, len(self.convolutions)
        for i, convolution in enumerate(self.convolutions, start=1):
            features = self.features * convolution.expansion
            stride = self.stride if convolution.strided else 1
            y = self.conv(features, kernel=convolution.kernel, stride=stride, name=f"conv{i}")(y)
            if i < last:
                y = self.norm(name=f"bn{i}")(y, relu=True)
        scale_init = nn.initializers.zeros if self.zero_init_last_scale else nn.initializers.ones
        if x.shape != y.shape:
            shortcut = {"kernel": 1, "stride": self.stride, "use_bias": not self.shortcut_norm}
            x = self.conv(y.shape[-1], **shortcut, name="downsample_conv")(x)
            x = self.norm(name="downsample_bn")(x) if self.shortcut_norm else x
        return self.norm(name=f"bn{last}", scale_init=scale_init)(y, residual=x, relu=True)


class ResNet(nn.Module):
    """A residual network; `build` creates one from a config.

    Attributes:
        width: the number of features of the stem and of the blocks of the first stage (`ResidualBlock.features`). Each
            later stage doubles it.
        stem: one of the functions in `STEMS`.
        kernel_init: the initializer of the convolutions.
        zero_init_last_scale: initialize the last scale of every block to zero, so that the block starts as the
            identity.
        shortcut_norm: whether shortcuts that change the shape have a batch norm, as in the paper. Otherwise they have
            a bias.
        blur_pool: blur images before each strided convolution; see `jaxddp.models.ops.blur`.
        axis_name: the mesh axis over which training averages batch statistics; None for statistics of each device.
        group: the number of consecutive images that training normalizes together; None for all images of a device.
        dtype: the dtype of the computation. The mean over pixels and the head use float32 or wider.
        param_dtype: the dtype of parameters and running statistics (float64 for exact comparisons, with
            `jax_enable_x64`).
        operations: the implementations of the operations; None for the defaults. See `jaxddp.platforms`.
    """

    architecture: Architecture
    num_classes: int
    width: int = 64
    stem: Callable[..., jax.Array] = imagenet_stem
    kernel_init: nn.initializers.Initializer = WEIGHT_INITS["he_normal"]
    zero_init_last_scale: bool = True
    shortcut_norm: bool = True
    blur_pool: bool = False
    axis_name: str | None = None
    group: int | None = None
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    operations: Operations | None = None

    def with_operations(self, operations: Operations) -> "ResNet":
        """Return the network with these implementations, or unchanged if it has implementations."""
        return self.clone(operations=operations) if self.operations is None else self

    def published_names(self) -> tuple[Naming, ...]:
        """Return the naming of torchvision and timm; see `jaxddp.models.published`."""
        return (TORCHVISION,)

    @property
    def depth(self) -> int:
        """Return the number of layers for `depth_of`: the stem, each block, and the head."""
        return sum(self.architecture.stage_sizes) + 2

    def depth_of(self, path: str) -> int:
        """Return the depth of an array; see `jaxddp.models.published`."""
        sizes = enumerate(self.architecture.stage_sizes, start=1)
        return depth_of(path, [(f"layer{stage}_{block}",) for stage, size in sizes for block in range(size)], ("fc",))

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Map normalized images [B, H, W, C] to logits [B, num_classes], in float32 or wider.

        With `train` the network normalizes by the batch's statistics, and updates the running statistics in the
        collection `batch_stats`. As in Flax, the running variance is biased. (PyTorch's is unbiased.)
        """
        conv, norm = self.layers(train)
        max_pool = (self.operations or Operations()).max_pool
        x = self.stem(images.astype(self.dtype), self.width, conv, norm, max_pool)
        for stage, blocks in enumerate(self.architecture.stage_sizes):
            for block in range(blocks):
                x = ResidualBlock(
                    self.architecture.block,
                    features=self.width * 2**stage,
                    stride=2 if stage > 0 and block == 0 else 1,
                    zero_init_last_scale=self.zero_init_last_scale,
                    conv=conv,
                    norm=norm,
                    shortcut_norm=self.shortcut_norm,
                    name=f"layer{stage + 1}_{block}",
                )(x)
        head_dtype = jnp.promote_types(self.dtype, jnp.float32)
        x = jnp.mean(x, axis=(1, 2), dtype=head_dtype)
        head_init = nn.initializers.normal(0.01)
        return nn.Dense(self.num_classes, True, head_dtype, self.param_dtype, kernel_init=head_init, name="fc")(x)

    def layers(self, train: bool) -> tuple[ModuleFactory, ModuleFactory]:
        """Return the factories of all convolutions and of all batch norms.

        Call the factories as `conv(features, kernel=3, stride=1, name="conv1")(x)` and `norm(name="bn1")(x)`. A norm
        also takes `residual=y`, which is added, and `relu=True`, which applies a ReLU last.
        """
        operations = self.operations or Operations()

        def conv(features: int, *, kernel: int, stride: int, name: str, use_bias: bool = False) -> nn.Conv:
            # This is PyTorch's padding, which is symmetric for any stride, unlike "SAME".
            padding = kernel // 2
            return nn.Conv(
                features,
                (kernel, kernel),
                stride,
                padding,
                use_bias=use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                kernel_init=self.kernel_init,
                conv_general_dilated=operations.conv_general_dilated(stride, padding),
                name=name,
            )

        norm = functools.partial(
            BatchNorm,
            use_running_average=not train,
            axis_name=self.axis_name,
            group=self.group,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            custom_gradient=operations.custom_norm_gradient,
        )
        return blurring(conv) if self.blur_pool else conv, norm


@dataclass(frozen=True)
class ResNetSettings:
    """The keys of the config section `model` that this network reads."""

    width: Width = 64
    stem: Stem = "imagenet"
    batch_norm: str = "local"
    zero_init_last_scale: bool = True
    shortcut_norm: bool = True
    weight_init: str = "he_normal"
    blur_pool: bool = False


def build(
    settings: ModelConfig, num_classes: int, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike = jnp.float32
) -> ResNet:
    """Build a ResNet from the config section `model`.

    With `batch_norm="sync"`, call the network in training inside a `shard_map` with the mesh axis "data". With
    `batch_norm="ghost:32"`, the number of images in training must be a multiple of 32.

    Raises:
        InputError: a name or a dtype is unknown, or a number is not positive.
    """
    options = settings_of(settings, ResNetSettings)
    if num_classes < 1:
        raise InputError(f"{settings.name}: num_classes is {num_classes}; give a positive number")
    for key, value in (("dtype", dtype), ("param_dtype", param_dtype)):
        check_floating("resnet", key, value)
    return ResNet(
        architecture=lookup("model", settings.name, ARCHITECTURES),
        num_classes=num_classes,
        width=options.width,
        stem=lookup("stem", options.stem, STEMS),
        kernel_init=kernel_init(settings.initialization),
        zero_init_last_scale=options.zero_init_last_scale,
        shortcut_norm=options.shortcut_norm,
        blur_pool=options.blur_pool,
        axis_name=settings.batch_statistics.axis_name,
        group=settings.batch_statistics.group,
        dtype=dtype,
        param_dtype=param_dtype,
    )


def _create(name: str, config: Config, num_classes: int) -> ResNet:
    return build(replace(config.model, name=name), num_classes, config.train.precision or jnp.float32)


for name in ARCHITECTURES:
    MODELS.add(name, ResNetSettings)(functools.partial(_create, name))
