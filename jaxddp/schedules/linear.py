"""Linear decay of the learning rate."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Share
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


@dataclass(frozen=True)
class LinearSettings:
    """The keys of the config section `optimizer` that this schedule reads."""

    end_factor: Share = 0.0


@SCHEDULES.add("linear", LinearSettings)
def linear(config: Config, steps: Steps) -> optax.Schedule:
    """Return a straight line from the peak to `end_factor` times the peak."""
    peak, settings = config.optimizer.learning_rate, settings_of(config.optimizer, LinearSettings)
    return optax.linear_schedule(peak, peak * settings.end_factor, steps.after_warmup)
