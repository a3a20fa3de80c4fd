"""AdamW."""

import optax

from jaxddp.config import Config
from jaxddp.optimizers.decay import decayed
from jaxddp.registry import OPTIMIZERS


@OPTIMIZERS.add("adamw")
def adamw(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    settings = config.optimizer
    return optax.adamw(
        learning_rate, b1=settings.momentum, b2=settings.beta2, weight_decay=settings.weight_decay, mask=decayed
    )
