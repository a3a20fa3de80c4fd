"""LARS: layer-wise adaptive rate scaling, for large batches."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay, Share, SomeShare
from jaxddp.optimizers.decay import add_decay, scale_kernels
from jaxddp.optimizers.kernels import BY_NAME, Kernels
from jaxddp.registry import OPTIMIZERS


@dataclass(frozen=True)
class LarsSettings:
    """The keys of the config section `optimizer` that LARS reads.

    The paper does not use Nesterov momentum. `epsilon` is added to the gradient's norm.
    """

    momentum: Decay = 0.9
    nesterov: bool = True
    trust_coefficient: SomeShare = 0.001
    epsilon: Share = 0.0


@OPTIMIZERS.add("lars", LarsSettings)
def lars(config: Config, learning_rate: optax.Schedule, kernels: Kernels = BY_NAME) -> optax.GradientTransformation:
    """Create LARS (You et al. 2017, arXiv:1708.03888): SGD with momentum and a learning rate for each kernel.

    A kernel's gradient g, with weight decay, is multiplied by `trust_coefficient` * |kernel| / |g|. Optax takes the
    norm of the sum of gradient and decay. The paper adds their two norms. Parameters without weight decay (batch norm
    and biases) are not scaled, as in MLPerf's reference for ResNet-50.
    """
    settings = settings_of(config.optimizer, LarsSettings)
    return optax.chain(
        add_decay(config, kernels),
        scale_kernels(kernels, settings.trust_coefficient, settings.epsilon),
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(settings.momentum, settings.nesterov),
    )
