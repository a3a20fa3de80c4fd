"""A rate that stays, and falls at the end: warm-up, stable, decay."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Share
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


@dataclass(frozen=True)
class WsdSettings:
    """Of `optimizer`."""

    decay_share: Share = 0.2
    end_factor: Share = 0.0


@SCHEDULES.add("wsd", WsdSettings)
def wsd(config: Config, steps: Steps) -> optax.Schedule:
    """The peak, and over the last `decay_share` of the run a straight line from it to `end_factor` of it.

    Hu et al. 2024 (arXiv:2404.06395); linear as in Hägele et al. 2024 (arXiv:2405.18392). What the warm-up
    leaves of a short run falls all of it.
    """
    peak, own = config.optimizer.learning_rate, settings_of(config.optimizer, WsdSettings)
    end, falling = peak * own.end_factor, min(round(own.decay_share * steps.total), steps.after_warmup)
    stable, fall = optax.constant_schedule(peak), optax.linear_schedule(peak, end, falling)
    return optax.join_schedules([stable, fall], [steps.after_warmup - falling]) if falling else stable
