"""Stochastic gradient descent, plain unless a config gives it momentum."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay
from jaxddp.optimizers.decay import add_decay
from jaxddp.registry import OPTIMIZERS


@dataclass(frozen=True)
class SgdSettings:
    """Of `optimizer`. With momentum and Nesterov's it is "momentum"."""

    momentum: Decay = 0.0
    nesterov: bool = False


@OPTIMIZERS.add("sgd", SgdSettings)
def sgd(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """SGD with the defaults of `optax.sgd` and PyTorch's `SGD`; weight decay is added to the gradient."""
    own = settings_of(config.optimizer, SgdSettings)
    return optax.chain(
        add_decay(config), optax.sgd(learning_rate, momentum=own.momentum or None, nesterov=own.nesterov)
    )
