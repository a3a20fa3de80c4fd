"""Layer-wise adaptive rate scaling, for large batches."""

import optax

from jaxddp.config import Config
from jaxddp.optimizers.decay import add_decay, decayed
from jaxddp.registry import OPTIMIZERS
from jaxddp.sections.optimizer import Numbers


@OPTIMIZERS.add("lars")
def lars(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """LARS (You et al. 2017, arXiv:1708.03888): SGD with momentum, at a rate that follows from each kernel's norm.

    A kernel's gradient g, with its decay, is multiplied by `trust_coefficient` * |kernel| / |g|, in which Optax takes
    the norm of the sum where the paper adds two norms. What is not decayed, batch norm and biases, is not scaled
    either, as in MLPerf's reference for ResNet-50. Of `optimizer` it reads `momentum`, `nesterov` (which the paper has
    not), `weight_decay`, `trust_coefficient` and `epsilon` (0, beside |g|).
    """
    settings = config.optimizer
    numbers = settings.numbers(Numbers(epsilon=0.0))
    return optax.chain(
        add_decay(config),
        optax.lars(
            learning_rate,
            trust_coefficient=settings.trust_coefficient,
            eps=numbers.epsilon,
            trust_ratio_mask=decayed,
            momentum=numbers.momentum,
            nesterov=numbers.nesterov,
        ),
    )
