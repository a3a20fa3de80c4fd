"""Cosine decay of the learning rate."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Share
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


@dataclass(frozen=True)
class CosineSettings:
    """The keys of the config section `optimizer` that this schedule reads."""

    end_factor: Share = 0.0


@SCHEDULES.add("cosine", CosineSettings)
def cosine(config: Config, steps: Steps) -> optax.Schedule:
    """Return half a cosine wave from the peak to `end_factor` times the peak.

    Source: Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts.
    """
    peak, settings = config.optimizer.learning_rate, settings_of(config.optimizer, CosineSettings)
    return optax.cosine_decay_schedule(peak, steps.after_warmup, settings.end_factor)
