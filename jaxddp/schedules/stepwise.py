"""Step decay of the learning rate."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Share
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


@dataclass(frozen=True)
class StepSettings:
    """The keys of the config section `optimizer` that this schedule reads."""

    step_at: tuple[Share, ...] = (1 / 3, 2 / 3, 8 / 9)
    step_factor: Share = 0.1


@SCHEDULES.add("step", StepSettings)
def step(config: Config, steps: Steps) -> optax.Schedule:
    """Return the peak, which is multiplied by `step_factor` after each share of the run in `step_at`."""
    settings = settings_of(config.optimizer, StepSettings)
    boundaries: dict[int, float] = {}
    for share in settings.step_at:
        # In a short run two shares may give the same step, whose factors multiply.
        boundary = round(share * steps.total) - steps.warmup
        boundaries[boundary] = boundaries.get(boundary, 1.0) * settings.step_factor
    return optax.piecewise_constant_schedule(config.optimizer.learning_rate, boundaries)
