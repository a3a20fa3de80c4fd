"""The 1cycle learning rate, which rises once, falls once, and ends far below its start."""

import optax

from jaxddp.config import Config
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps

_FALL = 0.55 / 0.7
"""The share of the steps after the rise in which the learning rate falls from the peak to its value at the start."""
_BEGIN, _END = 1 / 25, 1 / 250_000
"""The learning rate at the start and at the end of the run, relative to the peak. These values and `_FALL` are those of
`optax.linear_onecycle_schedule`, whose rise takes 30% of the run."""


@SCHEDULES.add("one_cycle")
def one_cycle(config: Config, steps: Steps) -> optax.Schedule:
    """Return the 1cycle policy (Smith & Topin 2017, arXiv:1708.07120). The rise is the warm-up, usually 30% of the run.

    After the warm-up the learning rate falls linearly to 1/25 of the peak. Over the final steps (15% of the run with a
    warm-up of 30%) it falls linearly to 1/250,000 of the peak. The momentum is constant.
    """
    peak, remaining = config.optimizer.learning_rate, steps.after_warmup
    fall_steps = max(int(_FALL * remaining), 1)
    fall = optax.linear_schedule(peak, peak * _BEGIN, fall_steps)
    final_fall = optax.linear_schedule(peak * _BEGIN, peak * _END, max(remaining - fall_steps, 1))
    return optax.join_schedules([fall, final_fall], [fall_steps])
