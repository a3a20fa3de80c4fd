"""A rate that falls at once, a few times."""

import optax

from jaxddp.config import Config
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


@SCHEDULES.add("step")
def step(config: Config, steps: Steps) -> optax.Schedule:
    """The peak, multiplied by `step_factor` at each share `step_at` of the run."""
    settings = config.optimizer
    boundaries: dict[int, float] = {}
    for share in settings.step_at:
        # In a short run two shares may fall on one step.
        boundary = round(share * steps.total) - steps.warmup
        boundaries[boundary] = boundaries.get(boundary, 1.0) * settings.step_factor
    return optax.piecewise_constant_schedule(settings.learning_rate, boundaries)
