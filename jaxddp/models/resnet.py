"""Residual networks for image classification, in Flax Linen: ResNets, and the variants of `ARCHITECTURES`.

Sources: He et al. 2015, "Deep residual learning for image recognition" (arXiv:1512.03385). The "v1.5" bottleneck, whose
3x3 convolution has the stride, and the explicit paddings are from github.com/facebookarchive/fb.resnet.torch. The
zero-initialized last scales and the head's initializer are from Goyal et al. 2017 (arXiv:1706.02677, section 5.1).
ResNet-10, with one block in each stage, is from Chen et al. 2019 (arXiv:1904.04232). ResNeXt has grouped convolutions
(Xie et al. 2017, arXiv:1611.05431), Wide ResNet has more features inside the bottlenecks (Zagoruyko and Komodakis 2016,
arXiv:1605.07146), ResNet-D has another stem and other shortcuts (He et al. 2019, arXiv:1812.01187), and SE-ResNet has
squeeze and excitation (Hu et al. 2018, arXiv:1709.01507). The names of arrays and the logits are those of torchvision
and timm.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxddp.choices import settings_of
from jaxddp.config import Config, ModelConfig
from jaxddp.core.errors import InputError, Key
from jaxddp.models.ops.blur import blurring
from jaxddp.models.ops.conv_norm import ModuleFactory, convolutions, norms
from jaxddp.models.ops.operations import Operations
from jaxddp.models.ops.residual_block import Convolution, ResidualBlock
from jaxddp.models.ops.squeeze_excitation import SqueezeExcitation
from jaxddp.models.ops.stems import STEMS, imagenet_stem
from jaxddp.models.published import Naming, depth_of, naming
from jaxddp.models.settings import WEIGHT_INITS, check_floating, kernel_init, lookup
from jaxddp.registry import MODELS
from jaxddp.sections.model_section import Stem, Width


@dataclass(frozen=True)
class Architecture:
    """The architecture of a ResNet.

    Attributes:
        stage_sizes: the number of blocks in each of four stages.
        block: the convolutions of a block.
        pooled_shortcut: see `ResidualBlock`.
        squeeze_excitation: whether each block has squeeze and excitation.
    """

    stage_sizes: tuple[int, ...]
    block: tuple[Convolution, ...]
    pooled_shortcut: bool = False
    squeeze_excitation: bool = False


BASIC = (Convolution(3, strided=True), Convolution(3))


def bottleneck(inner: int = 1, groups: int = 1) -> tuple[Convolution, ...]:
    """Return a bottleneck whose first two convolutions have `inner` times the features, the second in groups."""
    return Convolution(1, inner), Convolution(3, inner, strided=True, groups=groups), Convolution(1, expansion=4)


BOTTLENECK = bottleneck()

ARCHITECTURES = {
    "resnet10": Architecture((1, 1, 1, 1), BASIC),
    "resnet18": Architecture((2, 2, 2, 2), BASIC),
    "resnet34": Architecture((3, 4, 6, 3), BASIC),
    "resnet50": Architecture((3, 4, 6, 3), BOTTLENECK),
    "resnet101": Architecture((3, 4, 23, 3), BOTTLENECK),
    "resnet152": Architecture((3, 8, 36, 3), BOTTLENECK),
    "resnext50_32x4d": Architecture((3, 4, 6, 3), bottleneck(2, 32)),
    "resnext101_32x8d": Architecture((3, 4, 23, 3), bottleneck(4, 32)),
    "wide_resnet50_2": Architecture((3, 4, 6, 3), bottleneck(2)),
    "wide_resnet101_2": Architecture((3, 4, 23, 3), bottleneck(2)),
    "seresnet50": Architecture((3, 4, 6, 3), BOTTLENECK, squeeze_excitation=True),
}
D_ARCHITECTURES = {"resnet50d": Architecture((3, 4, 6, 3), BOTTLENECK, pooled_shortcut=True)}
"""The networks with the stem "deep" by default."""

_STEM = {"stem_conv1": 0, "stem_bn1": 1, "stem_conv2": 3, "stem_bn2": 4, "stem_conv3": 6}


def _naming(shortcut_conv: int) -> Naming:
    """Return the naming of torchvision and timm; the index of a shortcut's convolution depends on what is before it."""
    return naming(
        (r"(layer\d)_(\d+)", r"\1.\2"),
        ("downsample_conv", f"downsample.{shortcut_conv}"),
        ("downsample_bn", f"downsample.{shortcut_conv + 1}"),
        *((layer, f"conv1.{index}") for layer, index in _STEM.items()),
    )


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
        return (_naming(1 if self.architecture.pooled_shortcut else 0),)

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
        squeeze = functools.partial(SqueezeExcitation, dtype=self.dtype, param_dtype=self.param_dtype)
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
                    pooled_shortcut=self.architecture.pooled_shortcut,
                    squeeze=squeeze if self.architecture.squeeze_excitation else None,
                    name=f"layer{stage + 1}_{block}",
                )(x)
        head_dtype = jnp.promote_types(self.dtype, jnp.float32)
        x = jnp.mean(x, axis=(1, 2), dtype=head_dtype)
        head_init = nn.initializers.normal(0.01)
        return nn.Dense(self.num_classes, True, head_dtype, self.param_dtype, kernel_init=head_init, name="fc")(x)

    def layers(self, train: bool) -> tuple[ModuleFactory, ModuleFactory]:
        """Return the factories of all convolutions and of all batch norms.

        See `jaxddp.models.ops.conv_norm`.
        """
        operations = self.operations or Operations()
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        conv = convolutions(operations, self.kernel_init, **dtypes)
        norm = norms(operations, train, axis_name=self.axis_name, group=self.group, **dtypes)
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


@dataclass(frozen=True)
class ResNetDSettings(ResNetSettings):
    """The keys that a ResNet-D reads."""

    stem: Stem = "deep"


def build(
    settings: ModelConfig, num_classes: int, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike = jnp.float32
) -> ResNet:
    """Build a ResNet from the config section `model`.

    With `batch_norm="sync"`, call the network in training inside a `shard_map` with the mesh axis "data". With
    `batch_norm="ghost:32"`, the number of images in training must be a multiple of 32.

    Raises:
        InputError: a name or a dtype is unknown, or a number is not positive.
    """
    architecture = lookup("model", settings.name, {**ARCHITECTURES, **D_ARCHITECTURES})
    options = settings_of(settings, ResNetDSettings if settings.name in D_ARCHITECTURES else ResNetSettings)
    check_groups(architecture, options.width)
    if num_classes < 1:
        raise InputError(f"{settings.name}: num_classes is {num_classes}; give a positive number")
    for key, value in (("dtype", dtype), ("param_dtype", param_dtype)):
        check_floating("resnet", key, value)
    return ResNet(
        architecture=architecture,
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


def check_groups(architecture: Architecture, width: int) -> None:
    """Raise `InputError` if the groups of a grouped convolution do not divide its features."""
    for convolution in architecture.block:
        step = convolution.groups // math.gcd(convolution.groups, convolution.expansion)
        if width % step:
            problem = f": {width * convolution.expansion} features cannot be divided into {convolution.groups} groups"
            raise InputError(Key("model.width", width), problem, advice=f"give a multiple of {step}")


def _create(name: str, config: Config, num_classes: int) -> ResNet:
    return build(config.replace(model={"name": name}).model, num_classes, config.train.precision or jnp.float32)


for name in ARCHITECTURES:
    MODELS.add(name, ResNetSettings)(functools.partial(_create, name))
for d_name in D_ARCHITECTURES:
    MODELS.add(d_name, ResNetDSettings)(functools.partial(_create, d_name))
