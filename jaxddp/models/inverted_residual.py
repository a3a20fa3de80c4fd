"""Networks of inverted residual blocks: EfficientNets and MobileNets, in Flax Linen.

A block first increases the number of features, then convolves each feature separately, and then decreases the number.
Source: Sandler et al. 2018, "MobileNetV2: inverted residuals and linear bottlenecks" (arXiv:1801.04381). The tables of
`jaxddp.models.efficientnet` and `jaxddp.models.mobilenet` define the networks. The names of arrays and the logits are
those of torchvision.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxddp.models.network import Naming, Network, naming
from jaxddp.models.ops.layers import (
    Activation,
    ConvNorm,
    ModuleFactory,
    Operations,
    SqueezeExcitation,
    add_branch,
    branch_factors,
    convolutions,
    dropout,
    norms,
)

_normal = nn.initializers.normal(0.01)


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
    head_init: nn.initializers.Initializer = _normal


class InvertedResidual(nn.Module):
    """A block, x + f(x) if the shapes are equal, otherwise f(x).

    f is a 1x1 convolution, a depthwise convolution, squeeze and excitation, and a 1x1 convolution without activation.

    Attributes:
        conv, norm: factories of the layers; see `jaxddp.models.ops.layers`.
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
        return add_branch(x, self.layer(last)(y), factors)

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
        axis_name, group, dtype, param_dtype, operations: as in `jaxddp.models.resnet.ResNet`.
    """

    head_modules = ("last_conv", "hidden", "head")
    architecture: InvertedResidualSizes
    num_classes: int
    drop_path: float = 0.0
    dropout: float = 0.0
    axis_name: str | None = None
    group: int | None = None
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    operations: Operations | None = None

    def published_names(self) -> tuple[Naming, ...]:
        """Return the naming of torchvision; see `jaxddp.models.network`."""
        return (_naming(self.architecture),)

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
        conv, norm, squeeze = self.layers(train)
        layer = functools.partial(ConvNorm, conv, norm, activation=architecture.activation)
        x = layer(architecture.stem, 3, 2, name="stem")(images.astype(self.dtype))
        for (name, block), block_factors in zip(architecture.blocks, factors, strict=True):
            x = InvertedResidual(block, conv, norm, squeeze, name=name)(x, block_factors)
        x = layer(architecture.last, name="last_conv")(x)
        head_dtype = jnp.promote_types(self.dtype, jnp.float32)
        dense = functools.partial(
            nn.Dense, dtype=head_dtype, param_dtype=self.param_dtype, kernel_init=architecture.head_init
        )
        x = jnp.mean(x, axis=(1, 2), dtype=head_dtype)
        if architecture.hidden:
            x = architecture.activation(dense(architecture.hidden, name="hidden")(x))
        if train and self.dropout:
            x = dropout(x, self.dropout, example_keys)
        return dense(self.num_classes, name="head")(x)

    def layers(self, train: bool) -> tuple[ModuleFactory, ModuleFactory, ModuleFactory]:
        """Return the factories of convolutions, of batch norms, and of squeeze and excitation."""
        operations, architecture = self.operations or Operations(), self.architecture
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        statistics = {"momentum": architecture.momentum, "epsilon": architecture.epsilon, "group": self.group}
        return (
            convolutions(operations, **dtypes),
            norms(operations, train, axis_name=self.axis_name, **statistics, **dtypes),
            functools.partial(SqueezeExcitation, activation=architecture.squeeze, gate=architecture.gate, **dtypes),
        )


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
