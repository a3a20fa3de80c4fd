"""The learning rate of a run: a linear warm-up, then the schedule that the config names."""

from typing import NamedTuple

import optax

from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.wording import counted
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.peak import at_batch_size


class Steps(NamedTuple):
    """The numbers of steps of a run and of its warm-up."""

    total: int
    warmup: int

    @property
    def after_warmup(self) -> int:
        """Return the number of steps after the warm-up, at least 1, so that a schedule always has a length."""
        return max(self.total - self.warmup, 1)


def make_schedule(config: Config, steps: Steps) -> optax.Schedule:
    """Create the learning rate as a function of the step; the first step is 0.

    It rises linearly to the peak over the warm-up. It starts at peak / warmup steps and not at 0, so that no step is
    wasted. Then it follows the schedule `optimizer.schedule` over the rest of the run.

    Raises:
        InputError: the schedule's name is unknown, or the warm-up is longer than the run.
    """
    total, warmup = steps
    if warmup > total:
        raise InputError(
            Key("optimizer.warmup", config.optimizer.warmup, f'"{config.optimizer.warmup}"'),
            f" is {counted(warmup, 'step')}, longer than the run of {total}",
            advice='shorten it, or give it in percent ("5%")',
        )
    config = at_batch_size(config)
    after = SCHEDULES.get(config.optimizer.schedule)(config, steps)
    if not warmup:
        return after
    peak = config.optimizer.learning_rate
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])
