"""RegNetY-400MF to RegNetY-32GF for image classification, in Flax Linen.

Source: Radosavovic et al. 2020, "Designing network design spaces" (arXiv:2003.13678). Parameters, initial distributions
of kernels and logits equal those of torchvision's `regnet_y_400mf` to `regnet_y_32gf`.
"""

import functools
import itertools
from dataclasses import dataclass

import flax.linen as nn
import jax
import numpy as np

from jaxddp.models.network import Naming, Network, head_init, stage_blocks, torchvision_naming
from jaxddp.models.ops.layers import ConvNorm, Layer, ModuleFactory, SqueezeExcitation, nearest_multiple

_STEM_FEATURES = 32
_QUANTUM = 8
"""The widths are multiples of this number."""

TORCHVISION = torchvision_naming(
    (r"^stage(\d)_(\d+)/", r"trunk_output/block\1/block\1-\2/"),
    ("/conv1/", "/f/a/"),
    ("/conv2/", "/f/b/"),
    ("/conv3/", "/f/c/"),
    ("/se/", "/f/se/"),
    ("/shortcut/", "/proj/"),
    ("/conv/", "/0/"),
    ("/norm/", "/1/"),
)


@dataclass(frozen=True)
class RegNetSizes:
    """The parameters of a RegNet, section 3.3 of the paper.

    Attributes:
        depth: d, the number of blocks.
        initial_width: w_0, the width of the first block before quantization.
        slope: w_a, the increase of the width from block to block before quantization.
        step: w_m, the factor from one stage's width to the next.
        group: g, the features of a group.
    """

    depth: int
    initial_width: int
    slope: float
    step: float
    group: int

    @property
    def stages(self) -> list[tuple[int, int, int]]:
        """Return the number of blocks, the features and the number of groups of each stage.

        The blocks of a stage are those whose quantized widths are equal (equations 2 to 4 of the paper).
        """
        linear = self.initial_width + self.slope * np.arange(self.depth)
        exponents = np.round(np.log(linear / self.initial_width) / np.log(self.step))
        widths = np.round(self.initial_width * self.step**exponents / _QUANTUM).astype(int) * _QUANTUM
        stages = []
        for width, blocks in itertools.groupby(widths.tolist()):
            group = min(self.group, width)
            features = nearest_multiple(width, group)
            stages.append((len([*blocks]), features, features // group))
        return stages


ARCHITECTURES = {
    "regnet_y_400mf": RegNetSizes(16, 48, 27.89, 2.09, 8),
    "regnet_y_800mf": RegNetSizes(14, 56, 38.84, 2.4, 16),
    "regnet_y_1_6gf": RegNetSizes(27, 48, 20.71, 2.65, 24),
    "regnet_y_3_2gf": RegNetSizes(21, 80, 42.63, 2.66, 24),
    "regnet_y_8gf": RegNetSizes(17, 192, 76.82, 2.19, 56),
    "regnet_y_16gf": RegNetSizes(18, 200, 106.23, 2.48, 112),
    "regnet_y_32gf": RegNetSizes(20, 232, 115.89, 2.53, 232),
}
"""The values are from the paper's code (github.com/facebookresearch/pycls) and torchvision."""


class RegNetBlock(Layer):
    """relu(shortcut(x) + f(x)), f: 1x1 convolution, 3x3 convolution in groups, squeeze and excitation, 1x1 convolution.

    Attributes:
        features: the number of features of each convolution.
        groups: the number of groups of the 3x3 convolution.
        stride: 1, or 2 to halve the height and the width.
        conv, norm: factories of the layers; see `jaxddp.models.network.Network.layers`.
    """

    features: int
    groups: int
    stride: int
    conv: ModuleFactory
    norm: ModuleFactory

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inputs, layer = x.shape[-1], functools.partial(ConvNorm, self.conv, self.norm, self.features)
        y = layer(activation=nn.relu, name="conv1")(x)
        y = layer(3, self.stride, self.groups, nn.relu, name="conv2")(y)
        # The number of squeezed features is a quarter of the block's input.
        y = SqueezeExcitation(round(inputs / 4), name="se", **self.dtypes)(y)
        if inputs != self.features or self.stride > 1:
            x = layer(stride=self.stride, name="shortcut")(x)
        return layer(activation=nn.relu, name="conv3")(y, residual=x)


class RegNet(Network):
    """A RegNetY: a 3x3 convolution, and stages that each halve the height and the width."""

    head_modules = ("fc",)
    architecture: RegNetSizes
    num_classes: int

    def published_names(self) -> tuple[Naming, ...]:
        """Return the naming of torchvision; see `jaxddp.models.network`."""
        return (TORCHVISION,)

    def blocks(self) -> list[tuple[str, ...]]:
        return stage_blocks(blocks for blocks, _, _ in self.architecture.stages)

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Map normalized images [B, H, W, C] to logits [B, num_classes], in float32 or wider.

        With `train` the network normalizes by the batch's statistics, and updates the running statistics in the
        collection `batch_stats`.
        """
        conv, norm = self.layers(train)
        x = ConvNorm(conv, norm, _STEM_FEATURES, 3, 2, activation=nn.relu, name="stem")(images.astype(self.dtype))
        for number, (blocks, features, groups) in enumerate(self.architecture.stages, start=1):
            for block in range(blocks):
                stride = 2 if block == 0 else 1
                x = RegNetBlock(features, groups, stride, conv, norm, name=f"stage{number}_{block}", **self.dtypes)(x)
        return self.dense(self.num_classes, "fc", kernel_init=head_init, **self.wide)(self.mean(x))
