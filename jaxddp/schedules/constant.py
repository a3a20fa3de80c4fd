"""A rate that stays."""

import optax

from jaxddp.config import Config
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


# Of "plateau", `jaxddp.engine.parts.plateau.Plateau` lowers it as validations tell it.
@SCHEDULES.add("plateau")
@SCHEDULES.add("constant")
def constant(config: Config, steps: Steps) -> optax.Schedule:
    """The peak at every step."""
    return optax.constant_schedule(config.optimizer.learning_rate)
