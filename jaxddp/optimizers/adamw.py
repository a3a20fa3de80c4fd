"""AdamW: Adam with decoupled weight decay."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay, Share
from jaxddp.optimizers.decay import add_decay
from jaxddp.optimizers.kernels import BY_NAME, Kernels
from jaxddp.registry import OPTIMIZERS


@dataclass(frozen=True)
class AdamWSettings:
    """The keys of the config section `optimizer` that AdamW reads. `momentum` is beta 1."""

    momentum: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Share = 1e-8


@OPTIMIZERS.add("adamw", AdamWSettings)
def adamw(config: Config, learning_rate: optax.Schedule, kernels: Kernels = BY_NAME) -> optax.GradientTransformation:
    """Create AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    settings = settings_of(config.optimizer, AdamWSettings)
    return optax.chain(
        optax.scale_by_adam(b1=settings.momentum, b2=settings.beta2, eps=settings.epsilon),
        add_decay(config, kernels),
        optax.scale_by_learning_rate(learning_rate),
    )
