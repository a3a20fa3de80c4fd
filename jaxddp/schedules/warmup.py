"""The learning rate of a whole run: the warm-up, then the schedule that the config names, such as those below."""

from typing import NamedTuple

import optax

from jaxddp.config import Config
from jaxddp.errors import InputError
from jaxddp.registry import SCHEDULES


class Steps(NamedTuple):
    """How long a run and its warm-up are, in steps."""

    total: int
    warmup: int


def make_schedule(config: Config, steps: Steps) -> optax.Schedule:
    """The learning rate as a function of the step, 0 for the first.

    It rises linearly to the peak over the warm-up, beginning at peak / warmup steps so that no step is wasted, and then
    follows the schedule named `optimizer.schedule` over the rest of the run. Raises: InputError; an unknown name, or a
    warm-up longer than the run.
    """
    total, warmup = steps
    if warmup > total:
        raise InputError(
            f'optimizer.warmup="{config.optimizer.warmup}" is {warmup} steps, longer than the run of {total}; '
            'shorten it, or give it in percent ("5%")'
        )
    after = SCHEDULES.get(config.optimizer.schedule)(config, steps)
    if not warmup:
        return after
    peak = config.optimizer.learning_rate
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


@SCHEDULES.add("constant")
def constant(config: Config, steps: Steps) -> optax.Schedule:
    """The peak at every step."""
    return optax.constant_schedule(config.optimizer.learning_rate)


@SCHEDULES.add("plateau")
def plateau(config: Config, steps: Steps) -> optax.Schedule:
    """The peak at every step, which `jaxddp.engine.parts.plateau.Plateau` lowers as validations tell it."""
    return constant(config, steps)


@SCHEDULES.add("cosine")
def cosine(config: Config, steps: Steps) -> optax.Schedule:
    """Half a cosine wave, from the peak to 0 (Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts)."""
    return optax.cosine_decay_schedule(config.optimizer.learning_rate, max(steps.total - steps.warmup, 1))


@SCHEDULES.add("linear")
def linear(config: Config, steps: Steps) -> optax.Schedule:
    """A straight line from the peak to `end_factor` of it."""
    settings = config.optimizer
    end = settings.learning_rate * settings.end_factor
    return optax.linear_schedule(settings.learning_rate, end, max(steps.total - steps.warmup, 1))


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
