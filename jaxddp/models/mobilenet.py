"""MobileNetV3-Large for image classification, in Flax Linen.

Source: Howard et al. 2019, "Searching for MobileNetV3" (arXiv:1905.02244, table 1). Parameters, initial distributions
of kernels, statistics of batch norms and logits equal those of torchvision's `mobilenet_v3_large`.
"""

from collections.abc import Iterator

import flax.linen as nn

from jaxddp.models.inverted_residual import Block, InvertedResidualSizes
from jaxddp.models.ops.layers import nearest_multiple

_STEM = 16
# The rows of the table: kernel, expanded features, features, squeeze and excitation, hard swish (or ReLU), stride.
_LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


def _blocks() -> Iterator[tuple[str, Block]]:
    inputs = _STEM
    for number, (kernel, expanded, features, has_squeeze, is_swish, stride) in enumerate(_LARGE, start=1):
        squeeze = nearest_multiple(expanded // 4) if has_squeeze else 0
        activation = nn.hard_swish if is_swish else nn.relu
        yield f"block{number}", Block(inputs, expanded, features, kernel, stride, squeeze, activation)
        inputs = features


ARCHITECTURES = {
    "mobilenet_v3_large": InvertedResidualSizes(
        _STEM, tuple(_blocks()), 960, nn.hard_swish, nn.relu, nn.hard_sigmoid, hidden=1280, epsilon=1e-3, momentum=0.99
    )
}
