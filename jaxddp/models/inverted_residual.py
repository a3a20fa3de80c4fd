"""Networks of inverted residual blocks: EfficientNets and MobileNets, in Flax Linen.

A block first increases the number of features, then convolves each feature separately, and then decreases the number.
Sources: Sandler et al. 2018, "MobileNetV2: inverted residuals and linear bottlenecks" (arXiv:1801.04381, table 2);
Howard et al. 2019, "Searching for MobileNetV3" (arXiv:1905.02244, table 1); Qin et al. 2024, "MobileNetV4"
(arXiv:2404.10518, tables 11 to 13); Tan and Le 2019, "EfficientNet" (arXiv:1905.11946, table 1); Google's
"EfficientNet-lite" (2020); and Tan and Le 2021, "EfficientNetV2" (arXiv:2104.00298, table 4). Parameters, statistics of
batch norms and logits equal those of torchvision's networks of these names, or of timm's if torchvision has none.
Kernels start as torchvision's. Networks with the prefix "tf_" have TensorFlow's padding and epsilon, as timm's.
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

import jaxddp.models.ops.layers as ops
from jaxddp.models.network import LibraryNaming, Naming, Network, head_init, timm_naming, torchvision_naming
from jaxddp.models.ops.layers import Activation, ConvNorm, ModuleFactory, SqueezeExcitation, branch_factors


@dataclass(frozen=True)
class Block:
    """The dimensions of an inverted residual block.

    Attributes:
        inputs, expanded, features: the number of features of the input, between the convolutions, and of the output.
        kernel: the side of the kernel of the depthwise convolution; 0 for none.
        stride: 1, or 2 to halve the height and the width.
        squeeze: the features of the first layer of the squeeze and excitation; 0 for none.
        activation: the activation of the convolutions before the last.
        fused: one dense convolution replaces the expansion and the depthwise convolution (EfficientNetV2).
        start: the side of the kernel of a depthwise convolution before the expansion (MobileNetV4); 0 for none.
        linear: the last convolution has no activation. Otherwise the block is a fused one, and there is no addition.
    """

    inputs: int
    expanded: int
    features: int
    kernel: int
    stride: int
    squeeze: int
    activation: Activation
    fused: bool = False
    start: int = 0
    linear: bool = True

    @property
    def layers(self) -> dict[str, tuple[Any, ...]]:
        """Return the layers by name, in their order. A layer's index in this order is its published name.

        The values are the arguments of a `ConvNorm` after its factories, and of the squeeze and excitation.
        """
        is_expanded, last = self.expanded != self.inputs, None if self.linear else self.activation
        middle, divisions = ("fused", 1) if self.fused else ("depthwise", self.expanded)
        table: dict[str, tuple[bool, tuple[Any, ...]]] = {
            "start": (self.start > 0, (self.inputs, self.start, 1 if self.kernel else self.stride, self.inputs)),
            "expand": (is_expanded and not self.fused, (self.expanded, 1, 1, 1, self.activation)),
            middle: (self.kernel > 0, (self.expanded, self.kernel, self.stride, divisions, self.activation)),
            "se": (self.squeeze > 0, (self.squeeze,)),
            "project": (is_expanded or not (self.fused and self.linear), (self.features, 1, 1, 1, last)),
        }
        return {name: arguments for name, (is_present, arguments) in table.items() if is_present}


@dataclass(frozen=True)
class InvertedResidualSizes:
    """The architecture of a network.

    Attributes:
        stem: the number of features of the first convolution, whose kernel is 3x3 and whose stride is 2.
        blocks: the blocks with their names, in order. The numbers in a name are the block's place in torchvision.
        last: the number of features of the convolution after the blocks.
        activation: the activation of the stem, of the last convolution and of the hidden layer.
        squeeze, gate: the activations of the two layers of squeeze and excitation.
        namings: functions of the architecture, which return its namings; see `jaxddp.models.network`.
        hidden: the number of features of a layer between the mean over pixels and the head; 0 for none.
        hidden_norm: this layer has a batch norm in place of a bias.
        epsilon, momentum: those of the batch norms; see `BatchNorm`.
        head_init: the initializer of the head and of the hidden layer.
        same: strided convolutions have TensorFlow's padding "SAME", which depends on the size of the image.
    """

    stem: int
    blocks: tuple[tuple[str, Block], ...]
    last: int
    activation: Activation
    squeeze: Activation
    gate: Activation
    namings: "tuple[Callable[[InvertedResidualSizes], Naming], ...]"
    hidden: int = 0
    hidden_norm: bool = False
    epsilon: float = 1e-5
    momentum: float = 0.9
    head_init: nn.initializers.Initializer = head_init
    same: bool = False


class InvertedResidual(nn.Module):
    """A block, x + f(x) if the shapes are equal, otherwise f(x).

    f is a 1x1 convolution, a depthwise convolution, squeeze and excitation, and a 1x1 convolution without activation.

    Attributes:
        conv, norm: factories of the layers; see `jaxddp.models.network.Network.layers`.
        squeeze: a factory of squeeze and excitation, called with its number of features and its name.
    """

    block: Block
    conv: ModuleFactory
    norm: ModuleFactory
    squeeze: ModuleFactory

    @nn.compact
    def __call__(self, x: jax.Array, factors: jax.Array | None) -> jax.Array:
        """Apply the block. `factors`, [B, 1], multiply f(x) where it is added; see `branch_factors`."""
        block, y = self.block, x
        *first, last = block.layers
        for name in first:
            y = self.layer(name)(y)
        if block.stride > 1 or block.inputs != block.features or not block.linear:
            return self.layer(last)(y)
        if factors is None and last == "project":
            return self.layer(last)(y, residual=x)
        return ops.add_branch(x, self.layer(last)(y), factors)

    def layer(self, name: str) -> Any:
        """Return a layer by its name in `Block.layers`."""
        factory = self.squeeze if name == "se" else functools.partial(ConvNorm, self.conv, self.norm)
        return factory(*self.block.layers[name], name=name)


class InvertedResidualNetwork(Network):
    """A stem, inverted residual blocks, a 1x1 convolution, the mean over pixels, and a head.

    Attributes:
        drop_path: in training, an example skips block i of n, from block 0, with the probability `drop_path` * i / n.
        dropout: the probability that training sets an input of the head to zero.
    """

    head_modules = ("last_conv", "hidden", "head")
    architecture: InvertedResidualSizes
    num_classes: int
    drop_path: float = 0.0
    dropout: float = 0.0

    def published_names(self) -> tuple[Naming, ...]:
        """Return the namings; see `jaxddp.models.network`."""
        return tuple(naming_of(self.architecture) for naming_of in self.architecture.namings)

    def blocks(self) -> list[tuple[str, ...]]:
        return [(name,) for name, _ in self.architecture.blocks]

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False, example_keys: jax.Array | None = None) -> jax.Array:
        """Map normalized images [B, H, W, C] to logits [B, num_classes], in float32 or wider.

        With `train` the network normalizes by the batch's statistics, and updates the running statistics in the
        collection `batch_stats`.

        Args:
            example_keys: random keys [B], required in training with `drop_path` or `dropout`.

        Raises: InputError if the keys are missing.
        """
        architecture, count = self.architecture, len(self.architecture.blocks)
        rate = self.drop_path * (count - 1) / count if train else 0
        factors = branch_factors(rate, count, 1, example_keys)
        settings: dict[str, Any] = {"momentum": architecture.momentum, "epsilon": architecture.epsilon}
        conv, norm = self.layers(train, same=architecture.same, **settings)
        gates: dict[str, Any] = {"activation": architecture.squeeze, "gate": architecture.gate}
        squeeze = functools.partial(SqueezeExcitation, **gates, **self.dtypes)
        layer = functools.partial(ConvNorm, conv, norm, activation=architecture.activation)
        x = layer(architecture.stem, 3, 2, name="stem")(images.astype(self.dtype))
        for (name, block), block_factors in zip(architecture.blocks, factors, strict=True):
            x = InvertedResidual(block, conv, norm, squeeze, name=name)(x, block_factors)
        x = layer(architecture.last, name="last_conv")(x)
        settings, x = {"kernel_init": architecture.head_init, **self.wide}, self.mean(x)
        if architecture.hidden_norm:
            x = layer(architecture.hidden, name="hidden")(x[:, None, None].astype(self.dtype))[:, 0, 0]
        elif architecture.hidden:
            x = architecture.activation(self.dense(architecture.hidden, "hidden", **settings)(x))
        if train and self.dropout:
            x = ops.dropout(x, self.dropout, example_keys)
        return self.dense(self.num_classes, "head", **settings)(x)


def _torchvision(architecture: InvertedResidualSizes) -> Naming:
    """Return torchvision's naming, where a layer's index depends on the layers that its block has."""
    places = {name: ".".join(re.findall(r"\d+", name)) for name, _ in architecture.blocks}
    blocks = (
        (f"^{name}/{layer}/", f"features.{places[name]}.block.{index}/")
        for name, block in architecture.blocks
        for index, layer in enumerate(block.layers)
    )
    last = 1 + max(int(place.split(".")[0]) for place in places.values())
    head = ("classifier.0", "classifier.3") if architecture.hidden else ("", "classifier.1")
    return torchvision_naming(*blocks, *_outer_layers(last, *head))


def _torchvision_mobilenet_v2(architecture: InvertedResidualSizes) -> Naming:
    """Return torchvision's naming of MobileNetV2, where a block's last convolution and its norm are not a group."""
    rules = []
    for number, (name, block) in enumerate(architecture.blocks, start=1):
        (*first, _), theirs = block.layers, f"features.{number}.conv"
        last = len(first)
        rules += [(f"^{name}/project/conv/", f"{theirs}.{last}/"), (f"^{name}/project/norm/", f"{theirs}.{last + 1}/")]
        rules += [(f"^{name}/{layer}/", f"{theirs}.{index}/") for index, layer in enumerate(first)]
    return torchvision_naming(*rules, *_outer_layers(len(architecture.blocks) + 1, "", "classifier.1"))


def _outer_layers(last: int, hidden: str, head: str) -> list[tuple[str, str]]:
    """Return torchvision's names of the layers outside the blocks, and within a group of a convolution and a norm."""
    names = {"^stem/": "features.0/", "^last_conv/": f"features.{last}/", "^hidden": hidden, "^head": head}
    return [*names.items(), ("/conv/", "/0/"), ("/norm/", "/1/")]


def _timm(architecture: InvertedResidualSizes) -> Naming:
    """Return timm's naming, where the layers of each kind of block have other names."""
    names = {"stem/conv": "conv_stem", "stem/norm": "bn1", "head": "classifier", "hidden/conv": "conv_head"}
    names |= {"hidden/norm": "norm_head", "last_conv/conv": "conv_head", "last_conv/norm": "bn2"}
    is_universal, last = architecture.hidden_norm, architecture.blocks[-1][0].partition("_")[0].removeprefix("stage")
    for name, block in architecture.blocks:
        stage, place = map(int, re.findall(r"\d+", name))
        theirs, convs = f"blocks.{stage - 1}.{place}", [layer for layer in block.layers if layer != "se"]
        plain = {"expand": "conv_pw", "depthwise": "conv_dw", "fused": "conv_exp" if convs[1:] else "conv"}
        plain["project"] = "conv_pwl" if convs[0] != "depthwise" else "conv_pw"
        universal = {"start": "dw_start", "expand": "pw_exp", "depthwise": "dw_mid", "project": "pw_proj"}
        for number, layer in enumerate(convs, start=1):
            if not block.linear:
                conv, norm = (f"blocks.{stage - 1}.{number - 1}.{each}" for each in ("conv", "bn1"))
            elif is_universal and not block.fused:
                conv, norm = (f"{theirs}.{universal[layer]}.{each}" for each in ("conv", "bn"))
            else:
                conv, norm = f"{theirs}.{plain[layer]}", f"{theirs}.bn{number}"
            names |= {f"{name}/{layer}/conv": conv, f"{name}/{layer}/norm": norm}
        names |= {f"{name}/se/fc1": f"{theirs}.se.conv_reduce", f"{name}/se/fc2": f"{theirs}.se.conv_expand"}
    if is_universal:
        names |= {"last_conv/conv": f"blocks.{last}.0.conv", "last_conv/norm": f"blocks.{last}.0.bn1"}
    return timm_naming(*((f"^{ours}/", f"{theirs}/") for ours, theirs in names.items()))


def _efficientnet_pytorch(architecture: InvertedResidualSizes) -> Naming:
    """Return the naming of efficientnet_pytorch, which counts the blocks of all stages in one sequence."""
    names = {"stem/conv": "_conv_stem", "stem/norm": "_bn0", "last_conv/conv": "_conv_head", "last_conv/norm": "_bn1"}
    names["head"] = "_fc"
    for index, (name, _) in enumerate(architecture.blocks):
        theirs = f"_blocks.{index}."
        for number, layer in enumerate(("expand", "depthwise", "project")):
            names |= {f"{name}/{layer}/conv": f"{theirs}_{layer}_conv", f"{name}/{layer}/norm": f"{theirs}_bn{number}"}
        names |= {f"{name}/se/fc1": f"{theirs}_se_reduce", f"{name}/se/fc2": f"{theirs}_se_expand"}
    return LibraryNaming("efficientnet_pytorch", *((f"^{ours}/", f"{theirs}/") for ours, theirs in names.items()))


_TF: dict[str, Any] = {"epsilon": 1e-3, "momentum": 0.99, "same": True, "namings": (_timm, _efficientnet_pytorch)}
# torchvision draws the kernels of the heads of EfficientNets uniformly, within 1 / sqrt(classes).
_UNIFORM: dict[str, Any] = {"head_init": nn.initializers.variance_scaling(1 / 3, "fan_out", "uniform")}


def _network(
    stem: int,
    *stages: tuple[int, int, int, int, int, bool],
    last: int = 1280,
    activation: Activation = nn.silu,
    squeezes: bool = True,
    **settings: Any,
) -> InvertedResidualSizes:
    """Return the network of a table: expansion, kernel, stride, features, blocks, and whether the blocks are fused.

    The expansion is that of a block's input to the features between its convolutions. The stride is that of the first
    block. A fused block has no squeeze and excitation.

    Args:
        squeezes: whether the other blocks have it.
        settings: further attributes of the network.
    """
    blocks, inputs = [], stem
    for number, (expansion, kernel, stride, features, count, is_fused) in enumerate(stages, start=1):
        for index in range(count):
            squeeze = max(1, inputs // 4) if squeezes and not is_fused else 0
            numbers = (inputs, expansion * inputs, features, kernel, 1 if index else stride, squeeze)
            blocks.append((f"stage{number}_{index}", Block(*numbers, activation, is_fused)))
            inputs = features
    return InvertedResidualSizes(stem, tuple(blocks), last, activation, nn.silu, nn.sigmoid, **settings)


_B0 = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4))
_B0 += ((6, 3, 1, 320, 1),)


def _efficientnet(width: float, depth: float, *, is_lite: bool = False, **settings: Any) -> InvertedResidualSizes:
    """Return EfficientNet-B0 with its features and blocks multiplied.

    EfficientNet-Lite has no squeeze and excitation. Its stem, its last convolution and the number of blocks of its
    first and last stage are not multiplied.
    """
    stages = []
    for number, (*first, features, count) in enumerate(_B0):
        count = count if is_lite and number in (0, len(_B0) - 1) else math.ceil(depth * count)
        stages.append((*first, ops.nearest_multiple(width * features), count, False))
    settings |= _UNIFORM
    if is_lite:
        return _network(32, *stages, activation=nn.relu6, squeezes=False, **settings)
    return _network(ops.nearest_multiple(32 * width), *stages, last=4 * stages[-1][3], **settings)


_V2_STAGES = (1, 1), (4, 2), (4, 2), (4, 2), (6, 1), (6, 2), (6, 1)
"""The expansion and the stride of each stage."""


def _efficientnet_v2(*rows: tuple[int, int], **settings: Any) -> InvertedResidualSizes:
    """Return the network of a table: features, blocks. The blocks of three stages are fused."""
    pairs = zip(_V2_STAGES, rows, strict=False)
    stages = [(first, 3, stride, *row, number < 3) for number, ((first, stride), row) in enumerate(pairs)]
    return _network(rows[0][0], *stages, **_UNIFORM, **settings)


def _mobilenet_v2(width: float) -> InvertedResidualSizes:
    """Return MobileNetV2 with its features multiplied."""
    rows = (1, 1, 16, 1), (6, 2, 24, 2), (6, 2, 32, 3), (6, 2, 64, 4), (6, 1, 96, 3), (6, 2, 160, 3), (6, 1, 320, 1)
    stages = ((first, 3, stride, ops.nearest_multiple(width * n), count, False) for first, stride, n, count in rows)
    settings: dict[str, Any] = {"activation": nn.relu6, "squeezes": False, "last": max(1280, round(1280 * width))}
    return _network(round(32 * width / 8) * 8, *stages, namings=(_torchvision_mobilenet_v2, _timm), **settings)


def _mobilenet_v3(*stages: tuple[Any, ...]) -> InvertedResidualSizes:
    """Return the network of a table: kernel, features, stride, squeeze, hard swish (or ReLU), expanded features.

    The stride is that of a stage's first block. The last column has a number for each block.
    """
    inputs, blocks = 16, []
    for kernel, features, stride, has_squeeze, is_swish, *sizes in stages:
        for index, expanded in enumerate(sizes):
            squeeze = ops.nearest_multiple(expanded // 4) if has_squeeze else 0
            numbers = (inputs, expanded, features, kernel, 1 if index else stride, squeeze)
            blocks.append((f"block{len(blocks) + 1}", Block(*numbers, nn.hard_swish if is_swish else nn.relu)))
            inputs = features
    settings: dict[str, Any] = {"hidden": 1280, "epsilon": 1e-3, "momentum": 0.99, "namings": (_torchvision,)}
    return InvertedResidualSizes(16, tuple(blocks), 960, nn.hard_swish, nn.relu, nn.hard_sigmoid, **settings)


def _mobilenet_v4(fused: tuple[Block, ...], *stages: tuple[int, str]) -> InvertedResidualSizes:
    """Return the network of a table: the features of each stage after the fused blocks, and its blocks.

    A block is three digits: the kernels of its two depthwise convolutions, 0 for none, and its expansion. The stride of
    each stage is 2.
    """
    blocks, inputs = [(f"stage{number}_0", block) for number, block in enumerate(fused, start=1)], fused[-1].features
    for number, (features, words) in enumerate(stages, start=len(fused) + 1):
        for index, (start, kernel, expansion) in enumerate(map(int, word) for word in words.split()):
            numbers = (inputs, ops.nearest_multiple(expansion * inputs), features, kernel, 1 if index else 2, 0)
            blocks.append((f"stage{number}_{index}", Block(*numbers, nn.relu, start=start)))
            inputs = features
    gates = nn.relu, nn.relu, nn.sigmoid
    return InvertedResidualSizes(fused[0].inputs, tuple(blocks), 960, *gates, (_timm,), hidden=1280, hidden_norm=True)


def _fused(inputs: int, expanded: int, features: int, **settings: Any) -> Block:
    return Block(inputs, expanded, features, 3, 2, 0, nn.relu, fused=True, **settings)


_V2 = {
    "s": ((24, 2), (48, 4), (64, 4), (128, 6), (160, 9), (256, 15)),
    "m": ((24, 3), (48, 5), (80, 5), (160, 7), (176, 14), (304, 18), (512, 5)),
    "l": ((32, 4), (64, 7), (96, 7), (192, 10), (224, 19), (384, 25), (640, 7)),
}
_SCALES = ((1.0, 1.0), (1.0, 1.1), (1.1, 1.2), (1.2, 1.4), (1.4, 1.8), (1.6, 2.2), (1.8, 2.6), (2.0, 3.1))
# Only the smaller networks of timm have torchvision's epsilon.
_SMALL: dict[str, Any] = {"namings": (_torchvision, _timm), "epsilon": 1e-5}
_LITE: dict[str, Any] = {"namings": (_timm,), "epsilon": 1e-5}
_ALONE: dict[str, Any] = {"namings": (_torchvision,), "epsilon": 1e-3}
_LARGE: dict[str, Any] = {**_ALONE, "momentum": 0.99}
ARCHITECTURES = {
    **{f"efficientnet_b{i}": _efficientnet(*s, **(_SMALL if i < 5 else _LARGE)) for i, s in enumerate(_SCALES)},
    **{f"tf_efficientnet_b{i}": _efficientnet(*s, **_TF) for i, s in enumerate(_SCALES)},
    **{f"efficientnet_lite{i}": _efficientnet(*s, is_lite=True, **_LITE) for i, s in enumerate(_SCALES[:5])},
    **{f"tf_efficientnet_lite{i}": _efficientnet(*s, is_lite=True, **_TF) for i, s in enumerate(_SCALES[:5])},
    **{f"efficientnet_v2_{i}": _efficientnet_v2(*rows, **_ALONE) for i, rows in _V2.items()},
    **{f"tf_efficientnet_v2_{i}": _efficientnet_v2(*rows, **_TF | {"namings": (_timm,)}) for i, rows in _V2.items()},
    **{f"mobilenet_v2{name}": _mobilenet_v2(width) for name, width in (("", 1.0), ("_050", 0.5), ("_140", 1.4))},
    "mobilenet_v3_large": _mobilenet_v3(
        (3, 16, 1, False, False, 16),
        (3, 24, 2, False, False, 64, 72),
        (5, 40, 2, True, False, 72, 120, 120),
        (3, 80, 2, False, True, 240, 200, 184, 184),
        (3, 112, 1, True, True, 480, 672),
        (5, 160, 2, True, True, 672, 960, 960),
    ),
    "mobilenet_v4_conv_small": _mobilenet_v4(
        (_fused(32, 32, 32, linear=False), _fused(32, 96, 64, linear=False)),
        (96, "553 032 032 032 032 304"),
        (128, "336 554 054 053 034 034"),
    ),
    "mobilenet_v4_conv_medium": _mobilenet_v4(
        (_fused(32, 128, 48),),
        (80, "354 332"),
        (160, "356 334 334 354 334 304 002 304"),
        (256, "556 554 354 354 004 304 352 554 004 004 502"),
    ),
    "mobilenet_v4_conv_large": _mobilenet_v4(
        (_fused(24, 96, 48),),
        (96, "354 334"),
        (192, "354 334 334 334 354 534 534 534 534 534 304"),
        (512, "554 554 554 554 504 534 504 504 534 554 504 504 504"),
    ),
}
