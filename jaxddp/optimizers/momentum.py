"""SGD with momentum."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay
from jaxddp.optimizers.decay import add_decay
from jaxddp.optimizers.kernels import BY_NAME, Kernels
from jaxddp.registry import OPTIMIZERS


@dataclass(frozen=True)
class MomentumSettings:
    """The keys of the config section `optimizer` that SGD with momentum reads."""

    momentum: Decay = 0.9
    nesterov: bool = True


@OPTIMIZERS.add("momentum", MomentumSettings)
def momentum(config: Config, learning_rate: optax.Schedule, kernels: Kernels = BY_NAME) -> optax.GradientTransformation:
    """Create SGD with momentum. Weight decay is added to the gradient, as for the original ResNets."""
    settings = settings_of(config.optimizer, MomentumSettings)
    return optax.chain(
        add_decay(config, kernels), optax.sgd(learning_rate, momentum=settings.momentum, nesterov=settings.nesterov)
    )
