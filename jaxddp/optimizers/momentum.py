"""SGD with momentum."""

import optax

from jaxddp.config import Config
from jaxddp.optimizers.decay import decayed
from jaxddp.registry import OPTIMIZERS


@OPTIMIZERS.add("momentum")
def momentum(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """As the ResNets were trained: weight decay is added to the gradient."""
    settings = config.optimizer
    return optax.chain(
        optax.add_decayed_weights(settings.weight_decay, mask=decayed),
        optax.sgd(learning_rate, momentum=settings.momentum, nesterov=settings.nesterov),
    )
