"""Adam with decoupled weight decay."""

import optax

from jaxddp.config import Config
from jaxddp.optimizers.decay import add_decay
from jaxddp.registry import OPTIMIZERS

EPSILON = 1e-8


@OPTIMIZERS.add("adamw")
def adamw(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101).

    Of `optimizer` it reads `momentum` (beta 1), `beta2`, `epsilon` (1e-8) and `weight_decay`.
    """
    settings = config.optimizer
    epsilon = EPSILON if settings.epsilon is None else settings.epsilon
    return optax.chain(
        optax.scale_by_adam(b1=settings.momentum, b2=settings.beta2, eps=epsilon),
        add_decay(config),
        optax.scale_by_learning_rate(learning_rate),
    )
