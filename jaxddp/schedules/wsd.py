"""Warm-up, stable, decay (WSD): a constant learning rate that falls at the end of the run."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Share
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


@dataclass(frozen=True)
class WsdSettings:
    """The keys of the config section `optimizer` that this schedule reads."""

    decay_share: Share = 0.2
    end_factor: Share = 0.0


@SCHEDULES.add("wsd", WsdSettings)
def wsd(config: Config, steps: Steps) -> optax.Schedule:
    """Return the peak, and over the last `decay_share` of the run a line from the peak to `end_factor` times the peak.

    Source: Hu et al. 2024 (arXiv:2404.06395), with the linear decay of Hägele et al. 2024 (arXiv:2405.18392). If the
    warm-up leaves fewer steps than the decay needs, the decay takes all of them.
    """
    peak, settings = config.optimizer.learning_rate, settings_of(config.optimizer, WsdSettings)
    end, falling = peak * settings.end_factor, min(round(settings.decay_share * steps.total), steps.after_warmup)
    stable, fall = optax.constant_schedule(peak), optax.linear_schedule(peak, end, falling)
    return optax.join_schedules([stable, fall], [steps.after_warmup - falling]) if falling else stable
