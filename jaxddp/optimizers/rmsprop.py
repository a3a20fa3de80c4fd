"""RMSProp: gradients divided by a moving root mean square."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay, Share
from jaxddp.optimizers.decay import add_decay
from jaxddp.optimizers.kernels import BY_NAME, Kernels
from jaxddp.registry import OPTIMIZERS


@dataclass(frozen=True)
class RmsPropSettings:
    """The keys of the config section `optimizer` that RMSProp reads, with PyTorch's defaults.

    `beta2` is the decay of the mean square.
    """

    momentum: Decay = 0.0
    nesterov: bool = False
    beta2: Decay = 0.99
    epsilon: Share = 1e-8


@OPTIMIZERS.add("rmsprop", RmsPropSettings)
def rmsprop(config: Config, learning_rate: optax.Schedule, kernels: Kernels = BY_NAME) -> optax.GradientTransformation:
    """Create RMSProp (Tieleman & Hinton 2012, "Neural networks for machine learning", lecture 6.5), as in PyTorch.

    Unlike in `optax.rmsprop`, epsilon is added to the root, momentum accumulates updates before the multiplication by
    the learning rate, and the defaults differ. Weight decay is added to the gradient.
    """
    settings = settings_of(config.optimizer, RmsPropSettings)
    momentum = optax.trace(settings.momentum, settings.nesterov) if settings.momentum else optax.identity()
    return optax.chain(
        add_decay(config, kernels),
        optax.scale_by_rms(settings.beta2, settings.epsilon, eps_in_sqrt=False),
        momentum,
        optax.scale_by_learning_rate(learning_rate),
    )
