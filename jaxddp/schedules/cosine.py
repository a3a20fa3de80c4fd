"""Cosine decay of the learning rate."""

import optax

from jaxddp.config import Config
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps


@SCHEDULES.add("cosine")
def cosine(config: Config, steps: Steps) -> optax.Schedule:
    """Return half a cosine wave from the peak to 0 (Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts)."""
    return optax.cosine_decay_schedule(config.optimizer.learning_rate, steps.after_warmup)
