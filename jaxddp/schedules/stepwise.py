"""A rate that falls at once, a few times."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Share
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


@dataclass(frozen=True)
class StepSettings:
    """Of `optimizer`."""

    step_at: tuple[Share, ...] = (1 / 3, 2 / 3, 8 / 9)
    step_factor: Share = 0.1


@SCHEDULES.add("step", StepSettings)
def step(config: Config, steps: Steps) -> optax.Schedule:
    """The peak, multiplied by `step_factor` at each share `step_at` of the run."""
    own = settings_of(config.optimizer, StepSettings)
    boundaries: dict[int, float] = {}
    for share in own.step_at:
        # In a short run two shares may fall on one step.
        boundary = round(share * steps.total) - steps.warmup
        boundaries[boundary] = boundaries.get(boundary, 1.0) * own.step_factor
    return optax.piecewise_constant_schedule(config.optimizer.learning_rate, boundaries)
