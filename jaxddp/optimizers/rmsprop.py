"""Gradients divided by the root of the mean of their squares."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay, Share
from jaxddp.optimizers.decay import add_decay
from jaxddp.registry import OPTIMIZERS


@dataclass(frozen=True)
class RmsPropSettings:
    """Of `optimizer`, with PyTorch's defaults; `beta2` is the decay of the mean of squares."""

    momentum: Decay = 0.0
    nesterov: bool = False
    beta2: Decay = 0.99
    epsilon: Share = 1e-8


@OPTIMIZERS.add("rmsprop", RmsPropSettings)
def rmsprop(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """RMSProp (Tieleman & Hinton 2012, "Neural networks for machine learning", lecture 6.5), as PyTorch's `RMSprop`.

    It differs from `optax.rmsprop` in its defaults, and in that epsilon is added to the root and the rate multiplies
    what momentum adds up. Weight decay is added to the gradient.
    """
    own = settings_of(config.optimizer, RmsPropSettings)
    momentum = optax.trace(own.momentum, own.nesterov) if own.momentum else optax.identity()
    return optax.chain(
        add_decay(config),
        optax.scale_by_rms(own.beta2, own.epsilon, eps_in_sqrt=False),
        momentum,
        optax.scale_by_learning_rate(learning_rate),
    )
