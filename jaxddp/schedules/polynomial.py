"""A rate that falls by a power of what is left of the run."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Share
from jaxddp.registry import SCHEDULES
from jaxddp.schedules.warmup import Steps
from jaxddp.sections.optimizer_section import Power


@dataclass(frozen=True)
class PolynomialSettings:
    """Of `optimizer`."""

    power: Power = 2.0
    end_factor: Share = 0.0


@SCHEDULES.add("polynomial", PolynomialSettings)
def polynomial(config: Config, steps: Steps) -> optax.Schedule:
    """From the peak to `end_factor` of it, by the share of the run that is left, to the `power`.

    With 2 it is that of You et al. 2017 (arXiv:1708.03888) for LARS.
    """
    peak, own = config.optimizer.learning_rate, settings_of(config.optimizer, PolynomialSettings)
    return optax.polynomial_schedule(peak, peak * own.end_factor, own.power, steps.after_warmup)
