"""The built-in networks by name, by families with the same settings. Each imports its module when it is made."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxddp.config.registry import MODELS
from jaxddp.core.ranges import Decay, Range

if TYPE_CHECKING:
    from jaxddp.config import Config

Width = Annotated[int, Range(1, 4096)]
Stem = Literal["imagenet", "small", "deep"]


def _common(config: "Config") -> dict[str, Any]:
    """Return the settings of every network: the images that a batch norm normalizes together, and the dtype."""
    statistics = config.model.batch_statistics
    dtype = config.train.precision or "float32"
    return {"axis_name": statistics.axis_name, "group": statistics.group, "dtype": dtype}


@MODELS.add(
    *("resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d", "resnext101_32x8d"),
    *("wide_resnet50_2", "wide_resnet101_2", "seresnet50"),
)
@dataclass(frozen=True)
class ResNetSettings:
    """ResNets and their variants; see `jaxddp.models.resnet`."""

    width: Width = 64
    """ResNets and airbench: number of features of the first stage; all other stages are multiples of it."""
    stem: Stem = "imagenet"
    """ResNets: "imagenet" is a 7x7 convolution of stride 2 and a max-pool; "small" is one 3x3 convolution, for images
    of about 32 pixels; "deep" has three 3x3 convolutions in place of the 7x7 one, as in ResNet-D."""
    batch_norm: str = "local"
    """The images that batch norm normalizes together in training: "local", each device's part of the batch; "sync", the
    global batch; "ghost:K", every K consecutive images, with the same result on any number of devices."""
    zero_init_last_scale: bool = True
    """ResNets: start each block as the identity, with zero scales in its last batch norm."""
    shortcut_norm: bool = True
    """ResNets: whether batch norm follows the 1x1 convolutions of shortcuts; otherwise the convolutions have a bias."""
    weight_init: str = "he_normal"
    """ResNets: initialization of the convolutions' kernels. "he_", "xavier_" (or "glorot_") or "lecun_" followed by
    "normal" or "uniform"; or "orthogonal", "zeros", "normal(0.02)" or "truncated_normal(0.02)" with a standard
    deviation (by default 0.01; truncated at two standard deviations). The kernel of the head always has
    normal(0.01)."""
    blur_pool: bool = False
    """ResNets: blur the input of strided convolutions with 16 channels or more, so that the output depends less on
    small shifts of the image."""

    def make(self, config: "Config", num_classes: int) -> Any:
        import jaxddp.models.resnet as resnet

        return resnet.build(config.model, num_classes, config.train.precision or "float32")


@MODELS.add(
    *(f"resnet{depth}d" for depth in (18, 26, 34, 50, 101, 152, 200)),
    *(f"resnetrs{depth}" for depth in (50, 101, 152, 200, 270, 350, 420)),
)
@dataclass(frozen=True)
class ResNetDSettings(ResNetSettings):
    """ResNet-D and ResNet-RS."""

    stem: Stem = "deep"


@MODELS.add(*(f"regnet_y_{size}" for size in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf")))
@dataclass(frozen=True)
class RegNetSettings:
    """RegNetY; see `jaxddp.models.regnet`."""

    batch_norm: str = "local"

    def make(self, config: "Config", num_classes: int) -> Any:
        from jaxddp.models.regnet import ARCHITECTURES, RegNet

        return RegNet(ARCHITECTURES[config.model.name], num_classes, **_common(config))


@MODELS.add(
    *("mobilenet_v2", "mobilenet_v2_050", "mobilenet_v2_140", "mobilenet_v3_large"),
    *(f"mobilenet_v4_conv_{size}" for size in ("small", "medium", "large")),
)
@dataclass(frozen=True)
class MobileNetSettings:
    """MobileNets; see `jaxddp.models.inverted_residual`."""

    batch_norm: str = "local"
    dropout: Decay = 0.0
    """EfficientNets and MobileNets: the probability that training sets an input of the last layer to zero."""

    def make(self, config: "Config", num_classes: int) -> Any:
        from jaxddp.models.inverted_residual import ARCHITECTURES, InvertedResidualNetwork

        rates = getattr(self, "drop_path", 0.0), self.dropout
        return InvertedResidualNetwork(ARCHITECTURES[config.model.name], num_classes, *rates, **_common(config))


@MODELS.add(
    *(f"{tf}efficientnet_b{size}" for tf in ("", "tf_") for size in range(8)),
    *(f"{tf}efficientnet_v2_{size}" for tf in ("", "tf_") for size in "sml"),
    *(f"{tf}efficientnet_lite{size}" for tf in ("", "tf_") for size in range(5)),
)
@dataclass(frozen=True)
class EfficientNetSettings(MobileNetSettings):
    """EfficientNets; see `jaxddp.models.inverted_residual`."""

    drop_path: Decay = 0.0
    """ViTs, Swin Transformers, ConvNeXts and EfficientNets: stochastic depth. The probability that an example skips a
    block grows linearly, from 0 at the first block to this value at the last. In EfficientNets it is this value * i / n
    at block i of n, counted from 0."""


@MODELS.add(
    *(f"convnext_{size}" for size in ("atto", "femto", "pico", "nano", "tiny", "small", "base", "large", "xlarge")),
    *(f"convnextv2_{size}" for size in ("atto", "femto", "pico", "nano", "tiny", "base", "large", "huge")),
)
@dataclass(frozen=True)
class ConvNeXtSettings:
    """ConvNeXts; see `jaxddp.models.convnext`."""

    drop_path: Decay = 0.0

    def make(self, config: "Config", num_classes: int) -> Any:
        from jaxddp.models.convnext import SIZES, ConvNeXt

        return ConvNeXt(SIZES[config.model.name], num_classes, self.drop_path, **_common(config))


@MODELS.add("swin_t", "swin_s")
@dataclass(frozen=True)
class SwinSettings:
    """Swin Transformers; see `jaxddp.models.swin`."""

    drop_path: Decay = 0.0

    def make(self, config: "Config", num_classes: int) -> Any:
        from jaxddp.models.swin import STAGE_SIZES, Swin

        return Swin(STAGE_SIZES[config.model.name], num_classes, drop_path=self.drop_path, **_common(config))


@MODELS.add(
    *(f"vit_{size}" for size in ("ti16", "s8", "s16", "s32", "b8", "b16", "b32", "l16", "l32", "h14")),
    *(f"vit_{size}14_{name}" for size in "sblg" for name in ("dinov2", "reg4_dinov2")),
    *(f"vit_{size}_{name}" for size in ("b32", "b16", "l14", "h14") for name in ("clip", "clip_quickgelu")),
    *(f"vit_{size}_siglip" for size in ("b32", "b16", "l16", "so400m14", "so400m16")),
    *(f"vit_{size}_dinov3" for size in ("s16", "s16plus", "b16", "l16", "h16plus")),
)
@dataclass(frozen=True)
class ViTSettings:
    """Vision Transformers; see `jaxddp.models.vit`."""

    drop_path: Decay = 0.0

    def make(self, config: "Config", num_classes: int) -> Any:
        from jaxddp.models.vit import SIZES, ViT

        return ViT(SIZES[config.model.name], num_classes, self.drop_path, **_common(config))


@MODELS.add("airbench", "airbench94")
@dataclass(frozen=True)
class AirbenchSettings:
    """The networks of `jaxddp.models.airbench`."""

    width: Width = 64
    batch_norm: str = "local"

    def make(self, config: "Config", num_classes: int) -> Any:
        from jaxddp.models.airbench import ARCHITECTURES, Airbench

        return Airbench(num_classes, self.width, **_common(config), architecture=ARCHITECTURES[config.model.name])


@MODELS.add("airbench95", "airbench96")
@dataclass(frozen=True)
class WideAirbenchSettings(AirbenchSettings):
    """The wider networks of the paper."""

    width: Width = 128
