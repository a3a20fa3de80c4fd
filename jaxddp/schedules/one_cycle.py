"""The 1cycle learning rate: one rise and one fall, and a much lower end."""

import optax

from jaxddp.config import Config
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps

_FALL = 0.55 / 0.7
"""The share of the steps after the rise over which the learning rate falls to the start of a cycle."""
_BEGIN, _END = 1 / 25, 1 / 250_000
"""The start of a cycle and the end of the run, relative to the peak. These values and `_FALL` are those of
`optax.linear_onecycle_schedule`, whose rise takes 30% of the run."""


@SCHEDULES.add("one_cycle")
def one_cycle(config: Config, steps: Steps) -> optax.Schedule:
    """Return the 1cycle policy (Smith & Topin 2017, arXiv:1708.07120). The rise is the warm-up, usually 30% of the run.

    After the warm-up the learning rate falls linearly to 1/25 of the peak. Over the last part of the run (15% with that
    warm-up) it falls linearly to 1/250,000 of the peak. The momentum is constant.
    """
    peak, after = config.optimizer.learning_rate, steps.after_warmup
    falling = max(int(_FALL * after), 1)
    fall = optax.linear_schedule(peak, peak * _BEGIN, falling)
    last = optax.linear_schedule(peak * _BEGIN, peak * _END, max(after - falling, 1))
    return optax.join_schedules([fall, last], [falling])
