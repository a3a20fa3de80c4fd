"""Schedule-free AdamW, which averages the iterates of training instead of lowering the learning rate."""

from dataclasses import dataclass

import optax
from optax import contrib

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.errors import InputError, Key
from jaxddp.core.ranges import Decay, Share
from jaxddp.optimizers.decay import add_decay
from jaxddp.optimizers.kernels import BY_NAME, Kernels
from jaxddp.registry import OPTIMIZERS


@dataclass(frozen=True)
class ScheduleFreeSettings:
    """The keys of the config section `optimizer` that this optimizer reads.

    `momentum` is the paper's beta 1: the weight of the average of all iterates in the point at which gradients are
    computed; see `schedule_free`.
    """

    momentum: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Share = 1e-8


@OPTIMIZERS.add("schedule_free", ScheduleFreeSettings)
def schedule_free(
    config: Config, learning_rate: optax.Schedule, kernels: Kernels = BY_NAME
) -> optax.GradientTransformation:
    """Create schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682), like `optax.contrib.schedule_free_adamw`.

    The optimizer updates the iterates z, and x is their average. Gradients are computed at y, a point between z and x.
    Evaluation uses x; see `jaxddp.engine.parts.averages`.

    Raises:
        InputError: the schedule is not constant, or the momentum is 0.
    """
    settings = settings_of(config.optimizer, ScheduleFreeSettings)
    if config.optimizer.schedule != "constant":
        raise InputError(
            Key("optimizer.schedule", config.optimizer.schedule),
            ": schedule_free averages its steps instead of lowering the learning rate",
            advice="set it to constant, which also allows a warm-up",
        )
    if not settings.momentum:
        raise InputError(
            Key("optimizer.momentum", 0.0),
            ": schedule_free divides by the momentum",
            advice="give a number above 0, such as 0.9",
        )
    step = optax.chain(
        optax.scale_by_rms(decay=settings.beta2, eps=settings.epsilon, eps_in_sqrt=False, bias_correction=True),
        add_decay(config, kernels),
        optax.scale_by_learning_rate(learning_rate),
    )
    return contrib.schedule_free(step, learning_rate, b1=settings.momentum)
