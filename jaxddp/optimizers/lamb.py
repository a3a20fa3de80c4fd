"""LARS' idea for Adam, for large batches."""

import optax

from jaxddp.config import Config
from jaxddp.optimizers.decay import add_decay, decayed
from jaxddp.registry import OPTIMIZERS
from jaxddp.sections.optimizer import Numbers

EPSILON = 1e-6


@OPTIMIZERS.add("lamb")
def lamb(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """LAMB (You et al. 2019, arXiv:1904.00962, algorithm 2): Adam's update, with its decay, as long as the kernel is.

    It is `optax.lamb`, but that what is not decayed, batch norm and biases, is not scaled either and keeps Adam's
    update, as in timm and in TensorFlow Addons. Of `optimizer` it reads `momentum` (beta 1), `beta2`, `epsilon` (1e-6)
    and `weight_decay`.
    """
    numbers = config.optimizer.numbers(Numbers(epsilon=EPSILON))
    return optax.chain(
        optax.scale_by_adam(b1=numbers.momentum, b2=numbers.beta2, eps=numbers.epsilon),
        add_decay(config),
        optax.masked(optax.scale_by_trust_ratio(), decayed),
        optax.scale_by_learning_rate(learning_rate),
    )
