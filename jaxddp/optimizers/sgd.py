"""Stochastic gradient descent, plain unless a config gives it momentum."""

import optax

from jaxddp.config import Config
from jaxddp.optimizers.decay import add_decay
from jaxddp.registry import OPTIMIZERS
from jaxddp.sections.optimizer import Numbers


@OPTIMIZERS.add("sgd")
def sgd(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """SGD with the defaults of `optax.sgd` and PyTorch's `SGD`; weight decay is added to the gradient.

    Of `optimizer` it reads `weight_decay`, and `momentum` and `nesterov`, which are 0 and off where absent. With both
    given it is "momentum".
    """
    numbers = config.optimizer.numbers(Numbers(momentum=0.0, nesterov=False))
    return optax.chain(
        add_decay(config), optax.sgd(learning_rate, momentum=numbers.momentum or None, nesterov=numbers.nesterov)
    )
