"""A constant learning rate."""

from dataclasses import dataclass

import optax

from jaxddp.config import Config
from jaxddp.core.ranges import HeldOut, Period, Share
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


@dataclass(frozen=True)
class PlateauSettings:
    """The keys of the config section `optimizer` that `jaxddp.engine.parts.configured.Plateau` reads.

    The schedule "plateau" is constant. `Plateau` lowers the learning rate after validations.
    """

    plateau_factor: HeldOut = 0.1
    plateau_patience: Period = 10
    end_factor: Share = 0.0


@SCHEDULES.add("plateau", PlateauSettings)
@SCHEDULES.add("constant")
def constant(config: Config, steps: Steps) -> optax.Schedule:
    """Return the peak learning rate at every step."""
    return optax.constant_schedule(config.optimizer.learning_rate)
