"""Momentum that is made orthogonal, for kernels; Adam for the rest."""

from typing import Any

import jax
import optax
from optax import contrib

from jaxddp.config import Config
from jaxddp.optimizers.adamw import EPSILON
from jaxddp.optimizers.decay import add_decay, decayed
from jaxddp.registry import OPTIMIZERS
from jaxddp.sections.optimizer import Numbers

_ADAMS_SIZE = 0.2
"""The root of the mean square of an AdamW update, about, which an orthogonal one is scaled to."""
_ADAMS_BETA1 = 0.9


@OPTIMIZERS.add("muon")
def muon(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), in the size of AdamW's updates.

    A kernel's momentum becomes the nearest matrix of equal singular values, about, by five Newton-Schulz iterations.
    For a convolution that matrix is one of (height * width * input channels, output channels). Every kernel is scaled
    as in Liu et al. 2025 (arXiv:2502.16982, section 2.2), so that AdamW's learning rate and decay suit both kernels and
    the rest: batch norm and biases, which Adam trains at the same rate. Of `optimizer` it reads `momentum` (Muon's;
    0.95 is usual), `nesterov` (of both), `beta2` and `epsilon` (Adam's; 1e-8) and `weight_decay`.
    """
    numbers = config.optimizer.numbers(Numbers(epsilon=EPSILON))
    # The direction alone, with its sign: decay and rate follow, as they do in every optimizer.
    direction = contrib.muon(
        -1.0,
        beta=numbers.momentum,
        eps=numbers.epsilon,
        nesterov=numbers.nesterov,
        adam_b1=_ADAMS_BETA1,
        adam_b2=numbers.beta2,
        muon_weight_dimension_numbers=_matrices,
        consistent_rms=_ADAMS_SIZE,
    )
    return optax.chain(direction, add_decay(config), optax.scale_by_learning_rate(learning_rate))


def _matrices(params: Any) -> Any:
    """How each kernel is a matrix, whose last axis is its outputs; None for what is no kernel."""

    def matrix(array: jax.Array, kernel: bool) -> Any:
        return contrib.MuonDimensionNumbers(tuple(range(array.ndim - 1)), array.ndim - 1) if kernel else None

    return jax.tree.map(matrix, params, decayed(params))
