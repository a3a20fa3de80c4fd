"""SGD with momentum."""

import optax

from jaxddp.config import Config
from jaxddp.optimizers.decay import add_decay
from jaxddp.registry import OPTIMIZERS


@OPTIMIZERS.add("momentum")
def momentum(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """SGD as the ResNets were trained: weight decay is added to the gradient.

    Of `optimizer` it reads `momentum`, `nesterov` and `weight_decay`.
    """
    numbers = config.optimizer.numbers()
    return optax.chain(
        add_decay(config), optax.sgd(learning_rate, momentum=numbers.momentum, nesterov=numbers.nesterov)
    )
