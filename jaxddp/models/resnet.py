"""Residual networks for image classification: ResNet-10, 18, 34, 50, 101 and 152, in Flax Linen.

Sources: He et al. 2015, "Deep residual learning for image recognition" (arXiv:1512.03385); the "v1.5" bottleneck, which
strides on its 3x3 convolution, and the explicit paddings are those of github.com/facebookarchive/fb.resnet.torch;
zero-initialized last scales and the head's initializer are from Goyal et al. 2017 (arXiv:1706.02677, section 5.1);
ResNet-10, one block a stage, is from Chen et al. 2019 (arXiv:1904.04232).
Parameters have torchvision's names, see `TORCHVISION`; timm's are the same.
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
from jaxddp.models.ops.stems import STEMS, ModuleFactory, imagenet_stem
from jaxddp.models.published import Naming, depth_of, naming
from jaxddp.models.settings import WEIGHT_INITS, check_floating, kernel_init, lookup
from jaxddp.registry import MODELS
from jaxddp.sections.model_section import Stem, Width

Operation = Callable[[jax.Array, jax.Array, int, int], jax.Array]
"""(images [B, H, W, C], kernel [k, k, C, F], stride, padding) -> [B, H', W', F]."""


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

TORCHVISION = naming(
    (r"(layer\d)_(\d+)", r"\1.\2"), ("downsample_conv", "downsample.0"), ("downsample_bn", "downsample.1")
)


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + f(x)), where f is the block's convolutions, each with its batch norm."""

    convolutions: tuple[Convolution, ...]
    """Of f; the first `strided` one has the block's stride."""
    features: int
    """Of the narrow convolutions; the output has `features` times the last one's expansion."""
    stride: int
    """1, or 2 to halve height and width."""
    zero_init_last_scale: bool
    """Start as the identity, by a last scale of zero."""
    conv: ModuleFactory
    norm: ModuleFactory
    shortcut_norm: bool = True
    """Whether a shortcut of another shape has a batch norm behind its convolution, or a bias."""

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
    """A residual network; `build` makes one from a config.

    Attributes:
        width: features of the stem and of the first stage's narrow convolutions; each later stage doubles it.
        stem: one of `STEMS`' functions.
        kernel_init: initializer of the convolutions.
        zero_init_last_scale: every block starts as the identity.
        shortcut_norm: shortcuts of another shape have a batch norm, as published; else a bias.
        blur_pool: images are blurred before a convolution that strides, see `jaxddp.models.ops.blur`; no parameters.
        axis_name: mesh axis over which training averages batch statistics; None keeps them local to a device.
        group: so many consecutive images have batch statistics of their own in training; None for all of a device.
        dtype: of the computation. The mean over pixels and the head stay in float32 at least.
        param_dtype: of parameters and running statistics (float64 for proofs, under x64).
        convolution: what computes the convolutions; None leaves them to the library.
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
    convolution: Operation | None = None

    def with_convolution(self, convolution: Operation) -> "ResNet":
        """The same network with its convolutions computed so; one that has an operation already keeps it."""
        return self.clone(convolution=convolution) if self.convolution is None else self

    def published_names(self) -> tuple[Naming, ...]:
        """See `jaxddp.models.published`."""
        return (TORCHVISION,)

    @property
    def depth(self) -> int:
        """Of the layers that `depth_of` tells apart: the stem, each block, the head."""
        return sum(self.architecture.stage_sizes) + 2

    def depth_of(self, path: str) -> int:
        """See `jaxddp.models.published`."""
        sizes = enumerate(self.architecture.stage_sizes, start=1)
        return depth_of(path, [(f"layer{stage}_{block}",) for stage, size in sizes for block in range(size)], ("fc",))

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
                    shortcut_norm=self.shortcut_norm,
                    name=f"layer{stage + 1}_{block}",
                )(x)
        head_dtype = jnp.promote_types(self.dtype, jnp.float32)
        x = jnp.mean(x, axis=(1, 2), dtype=head_dtype)
        head_init = nn.initializers.normal(0.01)
        return nn.Dense(self.num_classes, True, head_dtype, self.param_dtype, kernel_init=head_init, name="fc")(x)

    def layers(self, train: bool) -> tuple[ModuleFactory, ModuleFactory]:
        """The factories of all convolutions and of all batch norms.

        They are called as `conv(features, kernel=3, stride=1, name="conv1")(x)` and `norm(name="bn1")(x)`, with
        `residual=y` and `relu=True` where an addition and a ReLU follow.
        """

        def conv(features: int, *, kernel: int, stride: int, name: str, use_bias: bool = False) -> nn.Conv:
            # The padding is torch's, symmetric whatever the stride, unlike "SAME".
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
                conv_general_dilated=self.convolution and for_flax(self.convolution, stride, padding),
                name=name,
            )

        norm = functools.partial(
            BatchNorm,
            use_running_average=not train,
            axis_name=self.axis_name,
            group=self.group,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            # Only a CPU brings an operation of its own; see `jaxddp.models.adapt.for_platform`.
            by_hand=self.convolution is None,
        )
        return blurring(conv) if self.blur_pool else conv, norm


def for_flax(operation: Operation, stride: int, padding: int) -> Callable[..., jax.Array]:
    """An operation in the place of `lax.conv_general_dilated`, whose further arguments say the same."""
    return lambda images, kernel, *_, **__: operation(images, kernel, stride, padding)


@dataclass(frozen=True)
class ResNetSettings:
    """Of `model`."""

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
    """Builds a ResNet from a config's `model`. Raises: InputError; a name or a dtype is unknown, or a number is not
    positive.

    With `batch_norm="sync"` the network trains only inside a `shard_map` that has the mesh axis "data", with
    `"ghost:32"` only on a multiple of 32 images.
    """
    own = settings_of(settings, ResNetSettings)
    if num_classes < 1:
        raise InputError(f"{settings.name}: num_classes is {num_classes}; give a positive number")
    for key, value in (("dtype", dtype), ("param_dtype", param_dtype)):
        check_floating("resnet", key, value)
    return ResNet(
        architecture=lookup("model", settings.name, ARCHITECTURES),
        num_classes=num_classes,
        width=own.width,
        stem=lookup("stem", own.stem, STEMS),
        kernel_init=kernel_init(settings.initialization),
        zero_init_last_scale=own.zero_init_last_scale,
        shortcut_norm=own.shortcut_norm,
        blur_pool=own.blur_pool,
        axis_name=settings.batch_statistics.axis_name,
        group=settings.batch_statistics.group,
        dtype=dtype,
        param_dtype=param_dtype,
    )


def _of(name: str, config: Config, num_classes: int) -> ResNet:
    return build(replace(config.model, name=name), num_classes, config.train.precision or jnp.float32)


for name in ARCHITECTURES:
    MODELS.add(name, ResNetSettings)(functools.partial(_of, name))
