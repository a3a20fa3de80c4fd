"""A rate that falls when the validation loss has stopped falling."""

import optax

from jaxddp.config import Config
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.constant import constant
from jaxddp.schedules.warmup import Steps


@SCHEDULES.add("plateau")
def plateau(config: Config, steps: Steps) -> optax.Schedule:
    """The peak at every step, which `jaxddp.engine.parts.plateau.Plateau` lowers as validations tell it."""
    return constant(config, steps)
