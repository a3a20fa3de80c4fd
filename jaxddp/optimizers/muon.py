"""Momentum that is made orthogonal, for kernels; Adam for the rest."""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from optax import contrib

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay, Share
from jaxddp.optimizers.decay import add_decay, decayed
from jaxddp.registry import OPTIMIZERS

_ADAMS_SIZE = 0.2
"""The root of the mean square of an AdamW update, about, which an orthogonal one is scaled to."""
_ADAMS_BETA1 = 0.9


@dataclass(frozen=True)
class MuonSettings:
    """Of `optimizer`: Muon's `momentum`, often 0.95, Adam's `beta2` and `epsilon`, and `nesterov` of both."""

    momentum: Decay = 0.9
    nesterov: bool = True
    beta2: Decay = 0.999
    epsilon: Share = 1e-8


@OPTIMIZERS.add("muon", MuonSettings)
def muon(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), in the size of AdamW's updates.

    A kernel's momentum becomes the nearest matrix of equal singular values, about, by five Newton-Schulz iterations.
    For a convolution that matrix is one of (height * width * input channels, output channels). Every kernel is scaled
    as in Liu et al. 2025 (arXiv:2502.16982, section 2.2), so that AdamW's learning rate and decay suit both kernels and
    the rest: batch norm and biases, which Adam trains at the same rate.
    """
    own = settings_of(config.optimizer, MuonSettings)
    # The direction alone, with its sign: decay and rate follow, as they do in every optimizer.
    direction = contrib.muon(
        -1.0,
        beta=own.momentum,
        eps=own.epsilon,
        nesterov=own.nesterov,
        adam_b1=_ADAMS_BETA1,
        adam_b2=own.beta2,
        muon_weight_dimension_numbers=_matrices,
        consistent_rms=_ADAMS_SIZE,
    )
    return optax.chain(direction, add_decay(config), optax.scale_by_learning_rate(learning_rate))


def _matrices(params: Any) -> Any:
    """How each kernel is a matrix, whose last axis is its outputs; None for what is no kernel."""

    def matrix(array: jax.Array, kernel: bool) -> Any:
        return contrib.MuonDimensionNumbers(tuple(range(array.ndim - 1)), array.ndim - 1) if kernel else None

    return jax.tree.map(matrix, params, decayed(params))
