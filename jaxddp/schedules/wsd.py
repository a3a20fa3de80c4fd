"""A rate that stays, and falls at the end: warm-up, stable, decay."""

import optax

from jaxddp.config import Config
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


@SCHEDULES.add("wsd")
def wsd(config: Config, steps: Steps) -> optax.Schedule:
    """The peak, and over the last `decay_share` of the run a straight line from it to `end_factor` of it.

    Hu et al. 2024 (arXiv:2404.06395); linear as in Hägele et al. 2024 (arXiv:2405.18392). What the warm-up
    leaves of a short run falls all of it.
    """
    settings = config.optimizer
    peak, end = settings.learning_rate, settings.learning_rate * settings.end_factor
    falling = min(round(settings.decay_share * steps.total), steps.after_warmup)
    stable, fall = optax.constant_schedule(peak), optax.linear_schedule(peak, end, falling)
    return optax.join_schedules([stable, fall], [steps.after_warmup - falling]) if falling else stable
