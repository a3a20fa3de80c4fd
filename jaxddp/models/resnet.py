"""Residual networks for image classification, in Flax Linen: ResNets, and the variants of `ARCHITECTURES`.

Sources: He et al. 2015, "Deep residual learning for image recognition" (arXiv:1512.03385). The "v1.5" bottleneck, whose
3x3 convolution has the stride, and the explicit paddings are from github.com/facebookarchive/fb.resnet.torch. The
zero-initialized last scales and the head's initializer are from Goyal et al. 2017 (arXiv:1706.02677, section 5.1).
ResNet-10, with one block in each stage, is from Chen et al. 2019 (arXiv:1904.04232). ResNeXt has grouped convolutions
(Xie et al. 2017, arXiv:1611.05431), Wide ResNet has more features inside the bottlenecks (Zagoruyko and Komodakis 2016,
arXiv:1605.07146), ResNet-D has another stem and other shortcuts (He et al. 2019, arXiv:1812.01187), and SE-ResNet has
squeeze and excitation (Hu et al. 2018, arXiv:1709.01507); ResNet-RS has all of these and a convolution in place of the
max pool (Bello et al. 2021, arXiv:2103.07579). The names of arrays and the logits are those of torchvision and timm.
"""

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jaxddp.models.ops.layers as ops
from jaxddp.config import ModelConfig, registry
from jaxddp.core.errors import InputError, Key, choices
from jaxddp.models.network import LibraryNaming, Naming, Network, head_init, stage_blocks
from jaxddp.models.ops.layers import WEIGHT_INITS, Layer, ModuleFactory, SqueezeExcitation

_LEAST_BLURRED_CHANNELS = 16
_BLUR_WEIGHTS = tuple(weight / 16 for weight in (1, 2, 1, 2, 4, 2, 1, 2, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def blur(images: jax.Array, stride: int = 1) -> jax.Array:
    """Convolve each channel with [1, 2, 1] x [1, 2, 1] / 16 and zero padding: [B, H, W, C] -> [B, H', W', C].

    H' is ceil(H / stride). Images may have any float dtype. Sums are computed in float32 or wider, and rounded once.
    Only reverse-mode differentiation is supported, not `jax.jvp`.
    """
    wide = jnp.promote_types(images.dtype, jnp.float32)
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    # XLA sums the nine slices in one pass over memory, while a separable filter takes two passes. On a CPU the sum
    # takes an eighth of the time of XLA's depthwise convolution.
    slices = zip(_BLUR_WEIGHTS, ops.pixels_of_windows(padded, (3, 3), stride), strict=True)
    return functools.reduce(jnp.add, [weight * pixels.astype(wide) for weight, pixels in slices]).astype(images.dtype)


def _blur_forward(images: jax.Array, stride: int) -> tuple[jax.Array, tuple[int, ...]]:
    return blur(images, stride), images.shape


def _blur_backward(stride: int, shape: tuple[int, ...], grads: jax.Array) -> tuple[jax.Array]:
    # A symmetric filter is its own transpose. The gradient that JAX derives would add nine images, one by one.
    sides = zip(shape[1:3], grads.shape[1:3], strict=True)
    margins = [(0, side - (outputs - 1) * stride - 1, stride - 1) for side, outputs in sides]
    spread = jax.lax.pad(grads, jnp.zeros((), grads.dtype), [(0, 0, 0), *margins, (0, 0, 0)])
    return (blur(spread),)


blur.defvjp(_blur_forward, _blur_backward)


def blurring(conv: ModuleFactory) -> ModuleFactory:
    """Wrap a factory of convolutions: strided convolutions first blur images that have 16 channels or more.

    The ResNets of FFCV (github.com/libffcv/ffcv-imagenet, `BlurPoolConv2d`) do the same: they blur before each strided
    convolution except the stem's, and not before the max pool. A blur has no parameters, and the convolutions keep
    their names.

    Args:
        conv: a factory that is called as `conv(features, kernel=3, stride=2, name="conv1")`.
    """

    def factory(features: int, *, kernel: int, stride: int, **options: Any) -> Any:
        def convolve(images: jax.Array) -> jax.Array:
            if stride == 1 or images.shape[-1] < _LEAST_BLURRED_CHANNELS:
                return conv(features, kernel=kernel, stride=stride, **options)(images)
            # A 1x1 convolution reads only the pixels that the strided blur computes.
            of_blur, left = (stride, 1) if kernel == 1 else (1, stride)
            return conv(features, kernel=kernel, stride=left, **options)(blur(images, of_blur))

        return convolve

    return factory


@dataclass(frozen=True)
class Convolution:
    """One convolution of a block.

    Attributes:
        kernel: the side of the kernel.
        expansion: the number of features, as a multiple of the block's `features`.
        strided: whether this convolution has the block's stride.
        groups: the number of groups of channels.
    """

    kernel: int
    expansion: int = 1
    strided: bool = False
    groups: int = 1


@dataclass(frozen=True)
class Architecture:
    """The architecture of a ResNet.

    Attributes:
        stage_sizes: the number of blocks in each of four stages.
        block: the convolutions of a block.
        pooled_shortcut: whether a shortcut with a stride takes the mean of 2x2 pixels before its convolution, which
            then has no stride.
        squeeze_excitation: 16 if each block has squeeze and excitation before its addition, which squeezes to a
            sixteenth of the features, as timm does; 0 for none.
        convolutional_pool: whether a 3x3 convolution with stride 2, a norm and a ReLU take the place of the max pool.
    """

    stage_sizes: tuple[int, ...]
    block: tuple[Convolution, ...]
    pooled_shortcut: bool = False
    squeeze_excitation: int = 0
    convolutional_pool: bool = False


class ResidualBlock(Layer):
    """A residual block, relu(shortcut(x) + f(x)), where f is the block's convolutions, each with a batch norm.

    Attributes:
        architecture: the architecture of the network. A `strided` convolution has the block's stride.
        features: the number of features of a convolution with expansion 1. The output has `features` times the last
            expansion.
        stride: 1, or 2 to halve the height and the width.
        conv, norm: factories of the layers; see `jaxddp.models.network.Network.layers`.
        zero_init_last_scale, shortcut_norm: see `ResNet`.
    """

    architecture: Architecture
    features: int
    stride: int
    conv: ModuleFactory
    norm: ModuleFactory
    zero_init_last_scale: bool = True
    shortcut_norm: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y, last = x, len(self.architecture.block)
        for i, convolution in enumerate(self.architecture.block, start=1):
            features = self.features * convolution.expansion
            stride = self.stride if convolution.strided else 1
            options = {"feature_group_count": convolution.groups, "name": f"conv{i}"}
            y = self.conv(features, kernel=convolution.kernel, stride=stride, **options)(y)
            if i < last:
                y = self.norm(name=f"bn{i}")(y, relu=True)
        scale_init = nn.initializers.zeros if self.zero_init_last_scale else nn.initializers.ones
        norm = self.norm(name=f"bn{last}", scale_init=scale_init)
        if not self.architecture.squeeze_excitation:
            return norm(y, residual=self.shortcut(x, y.shape), relu=True)
        squeezed = ops.nearest_multiple(y.shape[-1] / self.architecture.squeeze_excitation, least=0)
        y = SqueezeExcitation(squeezed, name="se", **self.dtypes)(norm(y))
        return nn.relu(self.shortcut(x, y.shape) + y)

    def shortcut(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Convert the input to the shape of the output."""
        if x.shape == shape:
            return x
        stride = self.stride
        if self.architecture.pooled_shortcut and stride == 2:
            x, stride = halve(x), 1
        options = {"kernel": 1, "stride": stride, "use_bias": not self.shortcut_norm}
        x = self.conv(shape[-1], **options, name="downsample_conv")(x)
        return self.norm(name="downsample_bn")(x) if self.shortcut_norm else x


def halve(images: jax.Array) -> jax.Array:
    """Take the means of squares of 2x2 pixels: [B, H, W, C] -> [B, ceil(H / 2), ceil(W / 2), C].

    If a side is odd, the last means are those of the remaining pixels.
    """
    batch, height, width, channels = images.shape
    if height % 2 or width % 2:
        images = jnp.pad(images, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    squares = images.reshape(batch, (height + 1) // 2, 2, (width + 1) // 2, 2, channels)
    return squares.mean((2, 4), dtype=jnp.promote_types(images.dtype, jnp.float32)).astype(images.dtype)


BASIC = (Convolution(3, strided=True), Convolution(3))


def bottleneck(inner: int = 1, groups: int = 1) -> tuple[Convolution, ...]:
    """Return a bottleneck whose first two convolutions have `inner` times the features, the second in groups."""
    return Convolution(1, inner), Convolution(3, inner, strided=True, groups=groups), Convolution(1, expansion=4)


BOTTLENECK = bottleneck()

_STAGES = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 26: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_STAGES |= {152: (3, 8, 36, 3), 200: (3, 24, 36, 3), 270: (4, 29, 53, 4), 350: (4, 36, 72, 4), 420: (4, 44, 87, 4)}
"""The number of blocks in each stage, by depth."""
_DEPTHS_D, _DEPTHS_RS = (18, 26, 34, 50, 101, 152, 200), (50, 101, 152, 200, 270, 350, 420)


def _of(depth: int, **settings: Any) -> Architecture:
    return Architecture(_STAGES[depth], BASIC if depth in (10, 18, 34) else BOTTLENECK, **settings)


ARCHITECTURES = {
    **{f"resnet{depth}": _of(depth) for depth in (10, 18, 34, 50, 101, 152)},
    "resnext50_32x4d": Architecture(_STAGES[50], bottleneck(2, 32)),
    "resnext101_32x8d": Architecture(_STAGES[101], bottleneck(4, 32)),
    **{f"wide_resnet{depth}_2": Architecture(_STAGES[depth], bottleneck(2)) for depth in (50, 101)},
    "seresnet50": _of(50, squeeze_excitation=16),
    **{f"resnet{depth}d": _of(depth, pooled_shortcut=True) for depth in _DEPTHS_D},
    **{f"resnetrs{depth}": Architecture(_STAGES[depth], BOTTLENECK, True, 4, True) for depth in _DEPTHS_RS},
}

_STEM = {"stem_conv1": 0, "stem_bn1": 1, "stem_conv2": 3, "stem_bn2": 4, "stem_conv3": 6}


def _naming(shortcut_conv: int) -> Naming:
    """Return the naming of torchvision and timm; the index of a shortcut's convolution depends on what is before it."""
    return LibraryNaming(
        "torchvision timm",
        (r"(layer\d)_(\d+)", r"\1.\2"),
        ("downsample_conv", f"downsample.{shortcut_conv}"),
        ("downsample_bn", f"downsample.{shortcut_conv + 1}"),
        *((layer, f"conv1.{index}") for layer, index in _STEM.items()),
        ("pool_conv", "maxpool.0"),
        ("pool_bn", "maxpool.1"),
    )


class ResNet(Network):
    """A residual network; `build` creates one from a config.

    Attributes:
        width: the number of features of the stem and of the blocks of the first stage (`ResidualBlock.features`). Each
            later stage doubles it.
        stem: "imagenet", a 7x7 convolution and a 3x3 max pool, each with stride 2; "small", a 3x3 convolution with
            stride 1, for images of about 32 pixels; or "deep", three 3x3 convolutions, the first with stride 2, and the
            max pool (He et al. 2019, "Bag of tricks for image classification", arXiv:1812.01187, ResNet-C).
        kernel_init: the initializer of the convolutions.
        zero_init_last_scale: initialize the last scale of every block to zero, so that the block starts as the
            identity.
        shortcut_norm: whether shortcuts that change the shape have a batch norm, as in the paper. Otherwise they have
            a bias.
        blur_pool: blur images before each strided convolution; see `jaxddp.models.resnet`.
    """

    head_modules = ("fc",)
    architecture: Architecture
    num_classes: int
    width: int = 64
    stem: str = "imagenet"
    kernel_init: nn.initializers.Initializer = WEIGHT_INITS["he_normal"]
    zero_init_last_scale: bool = True
    shortcut_norm: bool = True
    blur_pool: bool = False

    def published_names(self) -> tuple[Naming, ...]:
        """Return the naming of torchvision and timm; see `jaxddp.models.network`."""
        return (_naming(1 if self.architecture.pooled_shortcut else 0),)

    def blocks(self) -> list[tuple[str, ...]]:
        return stage_blocks(self.architecture.stage_sizes, "layer")

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Map normalized images [B, H, W, C] to logits [B, num_classes], in float32 or wider.

        With `train` the network normalizes by the batch's statistics, and updates the running statistics in the
        collection `batch_stats`. As in Flax, the running variance is biased. (PyTorch's is unbiased.)
        """
        conv, norm = self.layers(train, self.kernel_init)
        conv = blurring(conv) if self.blur_pool else conv
        x = self.before_blocks(images.astype(self.dtype), conv, norm)
        for stage, blocks in enumerate(self.architecture.stage_sizes):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                options = {"name": f"layer{stage + 1}_{block}", **self.dtypes}
                settings = conv, norm, self.zero_init_last_scale, self.shortcut_norm
                x = ResidualBlock(self.architecture, self.width * 2**stage, stride, *settings, **options)(x)
        return self.dense(self.num_classes, "fc", kernel_init=head_init, **self.wide)(self.mean(x))

    def before_blocks(self, x: jax.Array, conv: ModuleFactory, norm: ModuleFactory) -> jax.Array:
        """Apply the stem: [B, H, W, C] -> [B, H/4, W/4, width], or [B, H, W, width] for "small".

        The result of the layer `bn1` is that of the max pool after it.
        """
        kernel, stride = (7, 2) if self.stem == "imagenet" else (3, 1)
        name = "stem_conv3" if self.stem == "deep" else "conv1"
        for number, first_stride in ((1, 2), (2, 1)) if self.stem == "deep" else ():
            x = conv(max(1, self.width // 2), kernel=3, stride=first_stride, name=f"stem_conv{number}")(x)
            x = norm(name=f"stem_bn{number}")(x, relu=True)
        convolutional = self.architecture.convolutional_pool and self.stem != "small"
        pool = None if convolutional or self.stem == "small" else (3, 2, 1)
        x = norm(name="bn1")(conv(self.width, kernel=kernel, stride=stride, name=name)(x), relu=True, pool=pool)
        if convolutional:
            x = norm(name="pool_bn")(conv(self.width, kernel=3, stride=2, name="pool_conv")(x), relu=True)
        return x


def build(
    settings: ModelConfig, num_classes: int, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike = jnp.float32
) -> ResNet:
    """Build a ResNet from the config section `model`.

    With `batch_norm="sync"`, call the network in training inside a `shard_map` with the mesh axis "data". With
    `batch_norm="ghost:32"`, the number of images in training must be a multiple of 32.

    Raises: InputError if a name or a dtype is unknown, or a number is not positive.
    """
    if settings.name not in ARCHITECTURES:
        raise InputError(f"unknown model {settings.name!r}; {choices(settings.name, ARCHITECTURES)}")
    architecture, options = ARCHITECTURES[settings.name], registry.MODELS.settings(settings)
    check_groups(architecture, options.width)
    if num_classes < 1:
        raise InputError(f"{settings.name}: num_classes is {num_classes}; give a positive number")
    given: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
    for key, value in given.items():
        _check_floating(key, value)
    same = ("width", "stem", "zero_init_last_scale", "shortcut_norm", "blur_pool")
    given |= {name: getattr(options, name) for name in same}
    given |= {"axis_name": settings.batch_statistics.axis_name, "group": settings.batch_statistics.group}
    return ResNet(architecture, num_classes, kernel_init=_kernel_init(*settings.initialization), **given)


def check_groups(architecture: Architecture, width: int) -> None:
    """Raise `InputError` if the groups of a grouped convolution do not divide its features."""
    for convolution in architecture.block:
        step = convolution.groups // math.gcd(convolution.groups, convolution.expansion)
        if width % step:
            problem = f": {width * convolution.expansion} features cannot be divided into {convolution.groups} groups"
            raise InputError(Key("model.width", width), problem, advice=f"give a multiple of {step}")


_WITH_DEVIATION = {"normal": nn.initializers.normal, "truncated_normal": nn.initializers.truncated_normal}


def _kernel_init(name: str, deviation: float | None) -> nn.initializers.Initializer:
    """Return the initializer of a network's kernels. "glorot" and "xavier" are two names of the same initializers."""
    if deviation is not None:
        return _WITH_DEVIATION[name](deviation)
    return nn.initializers.zeros if name == "zeros" else WEIGHT_INITS[name.replace("glorot", "xavier")]


def _check_floating(key: str, dtype: Any) -> None:
    """Raise `InputError` if `dtype` is not a floating-point dtype."""
    with contextlib.suppress(TypeError):
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            return
    raise InputError(f'resnet: {key}={dtype!r}; give "float32", "bfloat16", "float16" or "float64"')
