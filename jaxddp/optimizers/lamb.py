"""LARS' idea for Adam, for large batches."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay, Share
from jaxddp.optimizers.decay import add_decay, decayed
from jaxddp.registry import OPTIMIZERS


@dataclass(frozen=True)
class LambSettings:
    """Of `optimizer`; `momentum` is beta 1."""

    momentum: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Share = 1e-6


@OPTIMIZERS.add("lamb", LambSettings)
def lamb(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """LAMB (You et al. 2019, arXiv:1904.00962, algorithm 2): Adam's update, with its decay, as long as the kernel is.

    It is `optax.lamb`, but that what is not decayed, batch norm and biases, is not scaled either and keeps Adam's
    update, as in timm and in TensorFlow Addons.
    """
    own = settings_of(config.optimizer, LambSettings)
    return optax.chain(
        optax.scale_by_adam(b1=own.momentum, b2=own.beta2, eps=own.epsilon),
        add_decay(config),
        optax.masked(optax.scale_by_trust_ratio(), decayed),
        optax.scale_by_learning_rate(learning_rate),
    )
