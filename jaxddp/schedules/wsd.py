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
    """Return the peak, with a linear fall to `end_factor` times the peak over the last `decay_share` of the run.

    Source: Hu et al. 2024 (arXiv:2404.06395), with the linear decay of Hägele et al. 2024 (arXiv:2405.18392). If the
    decay is longer than the run after the warm-up, it takes all steps after the warm-up.
    """
    peak, settings = config.optimizer.learning_rate, settings_of(config.optimizer, WsdSettings)
    end, decay_steps = peak * settings.end_factor, min(round(settings.decay_share * steps.total), steps.after_warmup)
    stable, fall = optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay_steps)
    return optax.join_schedules([stable, fall], [steps.after_warmup - decay_steps]) if decay_steps else stable
