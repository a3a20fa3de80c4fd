"""MobileNetV3-Large for image classification, in Flax Linen.

Source: Howard et al. 2019, "Searching for MobileNetV3" (arXiv:1905.02244, table 1). Parameters, initial distributions
of kernels, statistics of batch norms and logits equal those of torchvision's `mobilenet_v3_large`.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay
from jaxddp.models.inverted_residual import Block, InvertedResidualNetwork, InvertedResidualSizes
from jaxddp.models.ops.layers import nearest_multiple
from jaxddp.registry import MODELS

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


@dataclass(frozen=True)
class MobileNetSettings:
    """The keys of the config section `model` that this network reads."""

    batch_norm: str = "local"
    dropout: Decay = 0.0


def _create(name: str, config: Config, num_classes: int) -> InvertedResidualNetwork:
    statistics, dropout = config.model.batch_statistics, settings_of(config.model, MobileNetSettings).dropout
    return InvertedResidualNetwork(
        ARCHITECTURES[name],
        num_classes,
        dropout=dropout,
        axis_name=statistics.axis_name,
        group=statistics.group,
        dtype=config.train.precision or jnp.float32,
    )


for name in ARCHITECTURES:
    MODELS.add(name, MobileNetSettings)(functools.partial(_create, name))
