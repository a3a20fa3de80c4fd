"""A rate that falls evenly."""

import optax

from jaxddp.config import Config
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


@SCHEDULES.add("linear")
def linear(config: Config, steps: Steps) -> optax.Schedule:
    """A straight line from the peak to `end_factor` of it."""
    settings = config.optimizer
    end = settings.learning_rate * settings.end_factor
    return optax.linear_schedule(settings.learning_rate, end, steps.after_warmup)
