"""Layer-wise adaptive rate scaling, for large batches."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay, Share, SomeShare
from jaxddp.optimizers.decay import add_decay, decayed
from jaxddp.registry import OPTIMIZERS


@dataclass(frozen=True)
class LarsSettings:
    """Of `optimizer`. The paper has no Nesterov momentum; `epsilon` stands beside |g|."""

    momentum: Decay = 0.9
    nesterov: bool = True
    trust_coefficient: SomeShare = 0.001
    epsilon: Share = 0.0


@OPTIMIZERS.add("lars", LarsSettings)
def lars(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """LARS (You et al. 2017, arXiv:1708.03888): SGD with momentum, at a rate that follows from each kernel's norm.

    A kernel's gradient g, with its decay, is multiplied by `trust_coefficient` * |kernel| / |g|, in which Optax takes
    the norm of the sum where the paper adds two norms. What is not decayed, batch norm and biases, is not scaled
    either, as in MLPerf's reference for ResNet-50.
    """
    own = settings_of(config.optimizer, LarsSettings)
    return optax.chain(
        add_decay(config),
        optax.lars(
            learning_rate,
            trust_coefficient=own.trust_coefficient,
            eps=own.epsilon,
            trust_ratio_mask=decayed,
            momentum=own.momentum,
            nesterov=own.nesterov,
        ),
    )
