"""A rate that falls by a power of what is left of the run."""

import optax

from jaxddp.config import Config
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


@SCHEDULES.add("polynomial")
def polynomial(config: Config, steps: Steps) -> optax.Schedule:
    """From the peak to `end_factor` of it, by the share of the run that is left, to the `power`.

    With 2 it is that of You et al. 2017 (arXiv:1708.03888) for LARS.
    """
    settings = config.optimizer
    end = settings.learning_rate * settings.end_factor
    return optax.polynomial_schedule(settings.learning_rate, end, settings.power, steps.after_warmup)
