"""Polynomial decay of the learning rate."""

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
    """The keys of the config section `optimizer` that this schedule reads."""

    power: Power = 2.0
    end_factor: Share = 0.0


@SCHEDULES.add("polynomial", PolynomialSettings)
def polynomial(config: Config, steps: Steps) -> optax.Schedule:
    """Return peak * (end_factor + (1 - end_factor) * r**power), where r is the share of steps that remain.

    Steps are counted from the end of the warm-up. You et al. 2017 (arXiv:1708.03888) use a power of 2 for LARS.
    """
    peak, settings = config.optimizer.learning_rate, settings_of(config.optimizer, PolynomialSettings)
    return optax.polynomial_schedule(peak, peak * settings.end_factor, settings.power, steps.after_warmup)
