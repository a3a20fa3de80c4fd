"""AdamW whose parameters are averaged as it goes, in place of a rate that falls."""

from dataclasses import dataclass

import optax
from optax import contrib

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.ranges import Decay, Share
from jaxddp.optimizers.decay import add_decay
from jaxddp.registry import OPTIMIZERS


@dataclass(frozen=True)
class ScheduleFreeSettings:
    """Of `optimizer`; `momentum` is beta 1, which weighs x in y."""

    momentum: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Share = 1e-8


@OPTIMIZERS.add("schedule_free", ScheduleFreeSettings)
def schedule_free(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682), as `optax.contrib.schedule_free_adamw`.

    Gradients are taken at y, between the steps z and their average x, which evaluation measures; see
    `jaxddp.engine.parts.iterate_average`.

    Raises:
        InputError: the rate would fall all the same, or there is no momentum.
    """
    settings, own = config.optimizer, settings_of(config.optimizer, ScheduleFreeSettings)
    if settings.schedule != "constant":
        raise InputError(
            Key("optimizer.schedule", settings.schedule),
            ": schedule_free averages in place of a rate that falls",
            advice="set it to constant, which has a warm-up too",
        )
    if not own.momentum:
        raise InputError(
            Key("optimizer.momentum", 0.0),
            ": schedule_free divides by it",
            advice="give a number above 0, such as 0.9",
        )
    step = optax.chain(
        optax.scale_by_rms(decay=own.beta2, eps=own.epsilon, eps_in_sqrt=False, bias_correction=True),
        add_decay(config),
        optax.scale_by_learning_rate(learning_rate),
    )
    return contrib.schedule_free(step, learning_rate, b1=own.momentum)
