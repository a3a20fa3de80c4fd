"""The learning rate of a run: a linear warm-up, then the schedule that the config names."""

from typing import NamedTuple

import optax

from jaxddp.config import Config
from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import counted
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.peak import at_batch_size


class Steps(NamedTuple):
    """The numbers of steps of a run and of its warm-up."""

    total: int
    warmup: int

    @property
    def after_warmup(self) -> int:
        """Return the number of steps after the warm-up, at least 1, because optax's schedules need a step."""
        return max(self.total - self.warmup, 1)


def make_schedule(config: Config, steps: Steps) -> optax.Schedule:
    """Create the learning rate as a function of the step; the first step is 0.

    In the warm-up the learning rate rises linearly from peak / (number of warm-up steps) to the peak. It does not start
    at 0, because a step with a learning rate of 0 changes nothing. After the warm-up the learning rate follows
    `optimizer.schedule`.

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
    main_schedule = SCHEDULES.get(config.optimizer.schedule)(config, steps)
    if not warmup:
        return main_schedule
    peak = config.optimizer.learning_rate
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, main_schedule], [warmup])
