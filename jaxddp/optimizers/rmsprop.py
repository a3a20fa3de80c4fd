"""Gradients divided by the root of the mean of their squares."""

import optax

from jaxddp.config import Config
from jaxddp.optimizers.decay import add_decay
from jaxddp.registry import OPTIMIZERS
from jaxddp.sections.optimizer import Numbers

_PYTORCHS = Numbers(momentum=0.0, nesterov=False, beta2=0.99, epsilon=1e-8)


@OPTIMIZERS.add("rmsprop")
def rmsprop(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """RMSProp (Tieleman & Hinton 2012, "Neural networks for machine learning", lecture 6.5), as PyTorch's `RMSprop`.

    It differs from `optax.rmsprop` in its defaults, and in that epsilon is added to the root and the rate multiplies
    what momentum adds up. Weight decay is added to the gradient. Of `optimizer` it reads `weight_decay`, `beta2` (the
    decay of the mean of squares, 0.99), `epsilon` (1e-8), `momentum` (0) and `nesterov` (off).
    """
    numbers = config.optimizer.numbers(_PYTORCHS)
    momentum = optax.trace(numbers.momentum, numbers.nesterov) if numbers.momentum else optax.identity()
    return optax.chain(
        add_decay(config),
        optax.scale_by_rms(numbers.beta2, numbers.epsilon, eps_in_sqrt=False),
        momentum,
        optax.scale_by_learning_rate(learning_rate),
    )
