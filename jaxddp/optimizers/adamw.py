"""Adam with decoupled weight decay."""

import optax

from jaxddp.config import Config
from jaxddp.optimizers.decay import add_decay
from jaxddp.registry import OPTIMIZERS
from jaxddp.sections.optimizer import Numbers

EPSILON = 1e-8


@OPTIMIZERS.add("adamw")
def adamw(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101).

    Of `optimizer` it reads `momentum` (beta 1), `beta2`, `epsilon` (1e-8) and `weight_decay`.
    """
    numbers = config.optimizer.numbers(Numbers(epsilon=EPSILON))
    return optax.chain(
        optax.scale_by_adam(b1=numbers.momentum, b2=numbers.beta2, eps=numbers.epsilon),
        add_decay(config),
        optax.scale_by_learning_rate(learning_rate),
    )
