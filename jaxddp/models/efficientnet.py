"""EfficientNet-B0 and EfficientNetV2-S for image classification, in Flax Linen.

Sources: Tan and Le 2019, "EfficientNet" (arXiv:1905.11946, table 1), and Tan and Le 2021, "EfficientNetV2"
(arXiv:2104.00298, table 4). Parameters, initial distributions of kernels and logits equal those of torchvision's
`efficientnet_b0` and `efficientnet_v2_s`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import flax.linen as nn

from jaxddp.models.inverted_residual import Block, InvertedResidualSizes


@dataclass(frozen=True)
class Stage:
    """A row of the papers' tables.

    Attributes:
        expansion: the features between a block's convolutions, as a multiple of its input.
        kernel, stride: those of the first block. The other blocks have stride 1.
        features: the number of features of each block's output.
        blocks: the number of blocks.
        fused: see `Block`. A fused block has no squeeze and excitation.
    """

    expansion: int
    kernel: int
    stride: int
    features: int
    blocks: int
    fused: bool = False


def _blocks(stem: int, stages: tuple[Stage, ...]) -> Iterator[tuple[str, Block]]:
    inputs = stem
    for number, stage in enumerate(stages, start=1):
        for index in range(stage.blocks):
            stride = stage.stride if index == 0 else 1
            squeeze = 0 if stage.fused else max(1, inputs // 4)
            numbers = (inputs, stage.expansion * inputs, stage.features, stage.kernel, stride, squeeze)
            yield f"stage{number}_{index}", Block(*numbers, nn.silu, stage.fused)
            inputs = stage.features


def _architecture(stem: int, *stages: Stage, epsilon: float) -> InvertedResidualSizes:
    blocks = tuple(_blocks(stem, stages))
    # torchvision draws the head's kernel uniformly, within 1 / sqrt(classes).
    head_init = nn.initializers.variance_scaling(1 / 3, "fan_out", "uniform")
    return InvertedResidualSizes(stem, blocks, 1280, nn.silu, nn.silu, nn.sigmoid, epsilon=epsilon, head_init=head_init)


ARCHITECTURES = {
    "efficientnet_b0": _architecture(
        32,
        Stage(1, 3, 1, 16, 1),
        Stage(6, 3, 2, 24, 2),
        Stage(6, 5, 2, 40, 2),
        Stage(6, 3, 2, 80, 3),
        Stage(6, 5, 1, 112, 3),
        Stage(6, 5, 2, 192, 4),
        Stage(6, 3, 1, 320, 1),
        epsilon=1e-5,
    ),
    "efficientnet_v2_s": _architecture(
        24,
        Stage(1, 3, 1, 24, 2, fused=True),
        Stage(4, 3, 2, 48, 4, fused=True),
        Stage(4, 3, 2, 64, 4, fused=True),
        Stage(4, 3, 2, 128, 6),
        Stage(6, 3, 1, 160, 9),
        Stage(6, 3, 2, 256, 15),
        epsilon=1e-3,
    ),
}
