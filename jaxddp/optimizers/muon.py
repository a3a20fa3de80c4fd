"""Muon: orthogonalized momentum for kernels, and Adam for the other parameters."""

import functools
from dataclasses import dataclass

import jax
import optax
from optax import contrib

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay, Share
from jaxddp.optimizers.decay import add_decay
from jaxddp.optimizers.kernels import BY_NAME, Kernel, Kernels
from jaxddp.registry import OPTIMIZERS

_ADAMW_RMS = 0.2
"""The approximate root mean square of an AdamW update. Orthogonalized updates are scaled to this value."""
_ADAM_BETA1 = 0.9


@dataclass(frozen=True)
class MuonSettings:
    """The keys of the config section `optimizer` that Muon reads.

    `momentum` applies to Muon only and is often 0.95. `beta2` applies to Adam only. `epsilon` and `nesterov` apply to
    Muon and to Adam.
    """

    momentum: Decay = 0.9
    nesterov: bool = True
    beta2: Decay = 0.999
    epsilon: Share = 1e-8


@OPTIMIZERS.add("muon", MuonSettings)
def muon(config: Config, learning_rate: optax.Schedule, kernels: Kernels = BY_NAME) -> optax.GradientTransformation:
    """Create Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), scaled to the size of AdamW's updates.

    Five Newton-Schulz iterations approximate the orthogonal matrix nearest to a kernel's momentum. The kernel of a
    convolution is a matrix of (height * width * input channels, output channels), and the kernels of attention are
    matrices of (inputs, heads * size) and (heads * size, outputs). Each layer of a stack (`nn.scan`, `nn.vmap`) has its
    own matrices. Kernels are scaled as in Liu et al. 2025 (arXiv:2502.16982, section 2.2), so AdamW's learning rate and
    weight decay suit them. Adam trains the other parameters at the same learning rate: batch norm, biases, and the
    tables of `nn.Embed`.
    """
    settings = settings_of(config.optimizer, MuonSettings)
    # With a learning rate of -1 Muon returns the unscaled direction, to which decay and learning rate are applied.
    direction = contrib.muon(
        -1.0,
        beta=settings.momentum,
        eps=settings.epsilon,
        nesterov=settings.nesterov,
        adam_b1=_ADAM_BETA1,
        adam_b2=settings.beta2,
        muon_weight_dimension_numbers=functools.partial(kernels.map, _matrices),
        consistent_rms=_ADAMW_RMS,
    )
    return optax.chain(direction, add_decay(config, kernels), optax.scale_by_learning_rate(learning_rate))


def _matrices(kernel: Kernel | None, param: jax.Array) -> contrib.MuonDimensionNumbers | None:
    return contrib.MuonDimensionNumbers(kernel.inputs, kernel.outputs) if kernel and kernel.inputs else None
