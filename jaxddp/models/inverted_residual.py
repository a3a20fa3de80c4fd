"""Networks of inverted residual blocks: EfficientNets and MobileNets, in Flax Linen.

A block first increases the number of features, then convolves each feature separately, and then decreases the number.
Sources: Sandler et al. 2018, "MobileNetV2: inverted residuals and linear bottlenecks" (arXiv:1801.04381); Howard et al.
2019, "Searching for MobileNetV3" (arXiv:1905.02244, table 1); Tan and Le 2019, "EfficientNet" (arXiv:1905.11946, table
1); and Tan and Le 2021, "EfficientNetV2" (arXiv:2104.00298, table 4). Parameters, initial distributions of kernels,
statistics of batch norms and logits equal those of torchvision's networks of these names, and those of timm's
tf_efficientnet_lite0 to 4 (Google's "EfficientNet-lite", 2020).
"""

import functools
import math
import re
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

import jaxddp.models.ops.layers as ops
from jaxddp.models.network import Naming, Network, head_init, naming
from jaxddp.models.ops.layers import Activation, ConvNorm, ModuleFactory, SqueezeExcitation, branch_factors


@dataclass(frozen=True)
class Block:
    """The dimensions of an inverted residual block.

    Attributes:
        inputs, expanded, features: the number of features of the input, between the convolutions, and of the output.
        kernel: the side of the kernel of the depthwise convolution.
        stride: 1, or 2 to halve the height and the width.
        squeeze: the features of the first layer of the squeeze and excitation; 0 for none.
        activation: the activation of the convolutions before the last.
        fused: one dense convolution replaces the expansion and the depthwise convolution (EfficientNetV2).
    """

    inputs: int
    expanded: int
    features: int
    kernel: int
    stride: int
    squeeze: int
    activation: Activation
    fused: bool = False

    @property
    def layers(self) -> list[str]:
        """Return the names of the layers in their order. A layer's index in this list is its published name."""
        is_expanded = self.expanded != self.inputs
        if self.fused:
            return ["fused", "project"] if is_expanded else ["fused"]
        present = {"expand": is_expanded, "depthwise": True, "se": self.squeeze > 0, "project": True}
        return [name for name, is_present in present.items() if is_present]


@dataclass(frozen=True)
class InvertedResidualSizes:
    """The architecture of a network.

    Attributes:
        stem: the number of features of the first convolution, whose kernel is 3x3 and whose stride is 2.
        blocks: the blocks with their names, in order. The numbers in a name are the block's place in torchvision.
        last: the number of features of the convolution after the blocks.
        activation: the activation of the stem, of the last convolution and of the hidden layer.
        squeeze, gate: the activations of the two layers of squeeze and excitation.
        hidden: the number of features of a layer between the mean over pixels and the head; 0 for none.
        epsilon, momentum: those of the batch norms; see `BatchNorm`.
        head_init: the initializer of the head and of the hidden layer.
        of_tensorflow: whether strided convolutions have TensorFlow's padding "SAME", which depends on the size of the
            image, and the arrays have the names of timm and of efficientnet_pytorch.
    """

    stem: int
    blocks: tuple[tuple[str, Block], ...]
    last: int
    activation: Activation
    squeeze: Activation
    gate: Activation
    hidden: int = 0
    epsilon: float = 1e-5
    momentum: float = 0.9
    head_init: nn.initializers.Initializer = head_init
    of_tensorflow: bool = False


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
        if block.stride > 1 or block.inputs != block.features:
            return self.layer(last)(y)
        if factors is None and last == "project":
            return self.layer(last)(y, residual=x)
        return ops.add_branch(x, self.layer(last)(y), factors)

    def layer(self, name: str) -> Any:
        """Return a layer by its name in `Block.layers`."""
        block, layer = self.block, functools.partial(ConvNorm, self.conv, self.norm, name=name)
        match name:
            case "expand":
                return layer(block.expanded, activation=block.activation)
            case "depthwise":
                return layer(block.expanded, block.kernel, block.stride, block.expanded, block.activation)
            case "fused":
                return layer(block.expanded, block.kernel, block.stride, activation=block.activation)
            case "project":
                return layer(block.features)
        return self.squeeze(block.squeeze, name=name)


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
        """Return the naming of torchvision, or those of a network of TensorFlow; see `jaxddp.models.network`."""
        architecture = self.architecture
        return _tensorflow_namings(architecture) if architecture.of_tensorflow else (_naming(architecture),)

    def blocks(self) -> list[tuple[str, ...]]:
        return [(name,) for name, _ in self.architecture.blocks]

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False, example_keys: jax.Array | None = None) -> jax.Array:
        """Map normalized images [B, H, W, C] to logits [B, num_classes], in float32 or wider.

        With `train` the network normalizes by the batch's statistics, and updates the running statistics in the
        collection `batch_stats`.

        Args:
            example_keys: random keys [B], required in training with `drop_path` or `dropout`.

        Raises:
            InputError: the keys are missing.
        """
        architecture, count = self.architecture, len(self.architecture.blocks)
        rate = self.drop_path * (count - 1) / count if train else 0
        factors = branch_factors(rate, count, 1, example_keys)
        settings: dict[str, Any] = {"momentum": architecture.momentum, "epsilon": architecture.epsilon}
        conv, norm = self.layers(train, same=architecture.of_tensorflow, **settings)
        gates: dict[str, Any] = {"activation": architecture.squeeze, "gate": architecture.gate}
        squeeze = functools.partial(SqueezeExcitation, **gates, **self.dtypes)
        layer = functools.partial(ConvNorm, conv, norm, activation=architecture.activation)
        x = layer(architecture.stem, 3, 2, name="stem")(images.astype(self.dtype))
        for (name, block), block_factors in zip(architecture.blocks, factors, strict=True):
            x = InvertedResidual(block, conv, norm, squeeze, name=name)(x, block_factors)
        x = layer(architecture.last, name="last_conv")(x)
        settings, x = {"kernel_init": architecture.head_init, **self.wide}, self.mean(x)
        if architecture.hidden:
            x = architecture.activation(self.dense(architecture.hidden, "hidden", **settings)(x))
        if train and self.dropout:
            x = ops.dropout(x, self.dropout, example_keys)
        return self.dense(self.num_classes, "head", **settings)(x)


def _naming(architecture: InvertedResidualSizes) -> Naming:
    """Return torchvision's naming, where a layer's index depends on the layers that its block has."""
    places = {name: ".".join(re.findall(r"\d+", name)) for name, _ in architecture.blocks}
    last = 1 + max(int(place.split(".")[0]) for place in places.values())
    blocks = (
        (f"^{name}/{layer}/", f"features.{places[name]}.block.{index}/")
        for name, block in architecture.blocks
        for index, layer in enumerate(block.layers)
    )
    head = ("classifier.0", "classifier.3") if architecture.hidden else ("", "classifier.1")
    return naming(
        ("^stem/", "features.0/"),
        *blocks,
        ("^last_conv/", f"features.{last}/"),
        ("^hidden", head[0]),
        ("^head", head[1]),
        ("/conv/", "/0/"),
        ("/norm/", "/1/"),
    )


def _tensorflow_namings(architecture: InvertedResidualSizes) -> tuple[Naming, ...]:
    """Return the namings of timm and of efficientnet_pytorch, which counts the blocks of all stages in one sequence."""
    outer = ("stem/conv", "stem/norm", "last_conv/conv", "last_conv/norm", "head")
    timm = dict(zip(outer, ("conv_stem", "bn1", "conv_head", "bn2", "classifier"), strict=True))
    torch = dict(zip(outer, ("_conv_stem", "_bn0", "_conv_head", "_bn1", "_fc"), strict=True))
    for index, (name, block) in enumerate(architecture.blocks):
        stage, place = re.findall(r"\d+", name)
        pointwise = {"expand": "conv_pw", "depthwise": "conv_dw", "project": "conv_pw" + "l" * (len(block.layers) > 2)}
        for number, layer in enumerate(block.layers, start=1):
            ours, theirs = f"{name}/{layer}", f"blocks.{int(stage) - 1}.{place}"
            timm |= {f"{ours}/conv": f"{theirs}.{pointwise[layer]}", f"{ours}/norm": f"{theirs}.bn{number}"}
            norm = f"_blocks.{index}._bn{[*pointwise].index(layer)}"
            torch |= {f"{ours}/conv": f"_blocks.{index}._{layer}_conv", f"{ours}/norm": norm}
    return tuple(naming(*((f"^{ours}/", f"{theirs}/") for ours, theirs in names.items())) for names in (timm, torch))


_B0 = (
    (1, 3, 1, 16, 1, False),
    (6, 3, 2, 24, 2, False),
    (6, 5, 2, 40, 2, False),
    (6, 3, 2, 80, 3, False),
    (6, 5, 1, 112, 3, False),
    (6, 5, 2, 192, 4, False),
    (6, 3, 1, 320, 1, False),
)


def _efficientnet(
    stem: int,
    *stages: tuple[int, int, int, int, int, bool],
    epsilon: float,
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
    # torchvision draws the head's kernel uniformly, within 1 / sqrt(classes).
    settings |= {"head_init": nn.initializers.variance_scaling(1 / 3, "fan_out", "uniform"), "epsilon": epsilon}
    return InvertedResidualSizes(stem, tuple(blocks), 1280, activation, nn.silu, nn.sigmoid, **settings)


def _efficientnet_lite(width: float, depth: float) -> InvertedResidualSizes:
    """Return EfficientNet-B0 with its features and blocks multiplied, without squeeze and excitation.

    The stem, the last convolution and the number of blocks of the first and the last stage are not multiplied.
    """
    stages = []
    for number, (*first, features, count, is_fused) in enumerate(_B0):
        count = count if number in (0, len(_B0) - 1) else math.ceil(depth * count)
        stages.append((*first, ops.nearest_multiple(width * features), count, is_fused))
    settings: dict[str, Any] = {"epsilon": 1e-3, "momentum": 0.99, "of_tensorflow": True}
    return _efficientnet(32, *stages, activation=nn.relu6, squeezes=False, **settings)


def _mobilenet_v3(stem: int, *rows: tuple[int, int, int, bool, bool, int]) -> InvertedResidualSizes:
    """Return the network of a table: kernel, expanded features, features, squeeze, hard swish (or ReLU), stride."""
    inputs, blocks = [stem, *(row[2] for row in rows)], []
    for number, (kernel, expanded, features, has_squeeze, is_swish, stride) in enumerate(rows, start=1):
        squeeze = ops.nearest_multiple(expanded // 4) if has_squeeze else 0
        activation = nn.hard_swish if is_swish else nn.relu
        block = Block(inputs[number - 1], expanded, features, kernel, stride, squeeze, activation)
        blocks.append((f"block{number}", block))
    gates = nn.hard_swish, nn.relu, nn.hard_sigmoid
    return InvertedResidualSizes(stem, tuple(blocks), 960, *gates, hidden=1280, epsilon=1e-3, momentum=0.99)


ARCHITECTURES = {
    "efficientnet_b0": _efficientnet(32, *_B0, epsilon=1e-5),
    "efficientnet_lite0": _efficientnet_lite(1.0, 1.0),
    "efficientnet_lite1": _efficientnet_lite(1.0, 1.1),
    "efficientnet_lite2": _efficientnet_lite(1.1, 1.2),
    "efficientnet_lite3": _efficientnet_lite(1.2, 1.4),
    "efficientnet_lite4": _efficientnet_lite(1.4, 1.8),
    "efficientnet_v2_s": _efficientnet(
        24,
        (1, 3, 1, 24, 2, True),
        (4, 3, 2, 48, 4, True),
        (4, 3, 2, 64, 4, True),
        (4, 3, 2, 128, 6, False),
        (6, 3, 1, 160, 9, False),
        (6, 3, 2, 256, 15, False),
        epsilon=1e-3,
    ),
    "mobilenet_v3_large": _mobilenet_v3(
        16,
        (3, 16, 16, False, False, 1),
        (3, 64, 24, False, False, 2),
        (3, 72, 24, False, False, 1),
        (5, 72, 40, True, False, 2),
        *[(5, 120, 40, True, False, 1)] * 2,
        (3, 240, 80, False, True, 2),
        (3, 200, 80, False, True, 1),
        *[(3, 184, 80, False, True, 1)] * 2,
        (3, 480, 112, True, True, 1),
        (3, 672, 112, True, True, 1),
        (5, 672, 160, True, True, 2),
        *[(5, 960, 160, True, True, 1)] * 2,
    ),
}
