"""A rate that rises once, falls as far, and at the end much further."""

import optax

from jaxddp.config import Config
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps

_FALL = 0.55 / 0.7
"""Of what follows the rise, the share over which the rate falls to where a cycle begins."""
_BEGIN, _END = 1 / 25, 1 / 250_000
"""Of the peak. These and `_FALL` are those of `optax.linear_onecycle_schedule`, whose rise takes 30% of the run."""


@SCHEDULES.add("one_cycle")
def one_cycle(config: Config, steps: Steps) -> optax.Schedule:
    """The 1cycle policy (Smith & Topin 2017, arXiv:1708.07120), whose rise is the warm-up: `optimizer.warmup` 30%.

    Behind it the rate falls along a straight line to 1/25 of the peak, and over the last part of the run (15% of it,
    with that warm-up) to 1/250,000. The momentum stays as it is.
    """
    peak, after = config.optimizer.learning_rate, steps.after_warmup
    falling = max(int(_FALL * after), 1)
    fall = optax.linear_schedule(peak, peak * _BEGIN, falling)
    last = optax.linear_schedule(peak * _BEGIN, peak * _END, max(after - falling, 1))
    return optax.join_schedules([fall, last], [falling])
