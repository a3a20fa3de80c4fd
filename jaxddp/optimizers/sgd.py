"""Stochastic gradient descent, by default without momentum."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay
from jaxddp.optimizers.decay import add_decay
from jaxddp.optimizers.kernels import BY_NAME, Kernels
from jaxddp.registry import OPTIMIZERS


@dataclass(frozen=True)
class SgdSettings:
    """The keys of the config section `optimizer` that SGD reads. The optimizer "momentum" has other defaults."""

    momentum: Decay = 0.0
    nesterov: bool = False


@OPTIMIZERS.add("sgd", SgdSettings)
def sgd(config: Config, learning_rate: optax.Schedule, kernels: Kernels = BY_NAME) -> optax.GradientTransformation:
    """Create SGD with the defaults of `optax.sgd` and PyTorch's `SGD`. Weight decay is added to the gradient."""
    settings = settings_of(config.optimizer, SgdSettings)
    return optax.chain(
        add_decay(config, kernels),
        optax.sgd(learning_rate, momentum=settings.momentum or None, nesterov=settings.nesterov),
    )
