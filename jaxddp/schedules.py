"""The learning rate of a run: a linear warm-up to the peak, then the schedule that the config names."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from jaxddp.config.registry import SCHEDULES
from jaxddp.core.errors import InputError, Key, counted
from jaxddp.core.libraries import Lazy
from jaxddp.core.ranges import HeldOut, Period, Range, Share

if TYPE_CHECKING:
    import optax

    from jaxddp.config import Config
else:
    optax = Lazy("optax")

_FALL = 0.55 / 0.7
"""The share of the steps after the rise in which the 1cycle rate falls from the peak to its value at the start."""
_BEGIN, _END = 1 / 25, 1 / 250_000
"""The 1cycle rate at the start and at the end of the run, relative to the peak. These values and `_FALL` are those of
`optax.linear_onecycle_schedule`, whose rise takes 30% of the run."""


class Steps(NamedTuple):
    """The numbers of steps of a run, of its warm-up, and of the last part whose parameters are averaged."""

    total: int
    warmup: int
    averaged: int = 0

    @property
    def after_warmup(self) -> int:
        """Return the number of steps after the warm-up, at least 1, because optax's schedules need a step."""
        return max(self.total - self.warmup, 1)


def make_schedule(config: "Config", steps: Steps) -> "optax.Schedule":
    """Create the learning rate as a function of the step; the first step is 0.

    In the warm-up the learning rate rises linearly to the peak, from `optimizer.warmup_start` or, if this is None, from
    peak / (number of warm-up steps): a step with a learning rate of 0 changes nothing. After the warm-up the learning
    rate follows `optimizer.schedule`.

    Raises: InputError if the schedule's name is unknown, or the warm-up is longer than the run.
    """
    total, warmup, _ = steps
    if warmup > total:
        key = Key("optimizer.warmup", config.optimizer.warmup, f'"{config.optimizer.warmup}"')
        problem = f" is {counted(warmup, 'step')}, longer than the run of {total}"
        raise InputError(key, problem, advice='shorten it, or give it in percent ("5%")')
    config = at_batch_size(config)
    main_schedule = SCHEDULES.get(config.optimizer.schedule)(config, steps)
    if not warmup:
        return main_schedule
    peak, start = config.optimizer.learning_rate, config.optimizer.warmup_start
    first, length = (peak / warmup, max(warmup - 1, 1)) if start is None else (start * peak, warmup)
    return optax.join_schedules([optax.linear_schedule(first, peak, length), main_schedule], [warmup])


def batch_factor(config: "Config") -> float:
    """Return the factor of `optimizer.learning_rate` for a global batch other than `optimizer.reference_batch`.

    Sources: Goyal et al. 2017 (arXiv:1706.02677, section 2.1) for linear scaling, and Krizhevsky 2014 (arXiv:1404.5997)
    for scaling by the square root.
    """
    settings = config.optimizer
    if settings.reference_batch is None or settings.scaling == "none":
        return 1.0
    quotient = config.train.batch_size / settings.reference_batch
    return quotient if settings.scaling == "linear" else math.sqrt(quotient)


def at_batch_size(config: "Config") -> "Config":
    """Return a config whose `optimizer.learning_rate` is the peak for `train.batch_size`.

    Schedules and optimizers are created from this config. Raises: InputError if the peak is out of range.
    """
    if config.optimizer.reference_batch is None:
        return config
    peak = config.optimizer.learning_rate * batch_factor(config)
    return config.replace(optimizer={"learning_rate": peak, "reference_batch": None})


def derivation(config: "Config") -> str | None:
    """Return a line that explains how the peak is computed; None if the config specifies the peak directly."""
    settings, batch = config.optimizer, config.train.batch_size
    if settings.reference_batch is None or settings.scaling == "none":
        return None
    quotient = f"{batch} / {settings.reference_batch}"
    factor = quotient if settings.scaling == "linear" else f"sqrt({quotient})"
    product = f"{settings.learning_rate * batch_factor(config):.6g} = {settings.learning_rate:g} x {factor}"
    return f"learning rate {product} ({settings.scaling}, for optimizer.reference_batch={settings.reference_batch})"


@SCHEDULES.add("constant")
def constant(config: "Config", steps: Steps) -> "optax.Schedule":
    """Return the peak learning rate at every step."""
    return optax.constant_schedule(config.optimizer.learning_rate)


@SCHEDULES.add("cosine")
@dataclass(frozen=True)
class Cosine:
    """Half a cosine wave from the peak to `end_factor` times the peak.

    Source: Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts.
    """

    end_factor: Share = 0.0
    """Schedules "cosine", "linear", "polynomial" and "wsd": the last learning rate as a fraction of the peak. Schedule
    "plateau": the lowest rate as a fraction of the peak."""

    def make(self, config: "Config", steps: Steps) -> "optax.Schedule":
        return optax.cosine_decay_schedule(config.optimizer.learning_rate, steps.after_warmup, self.end_factor)


@SCHEDULES.add("linear")
@dataclass(frozen=True)
class Linear:
    """A straight line from the peak to `end_factor` times the peak."""

    end_factor: Share = 0.0

    def make(self, config: "Config", steps: Steps) -> "optax.Schedule":
        peak = config.optimizer.learning_rate
        return optax.linear_schedule(peak, peak * self.end_factor, steps.after_warmup)


@SCHEDULES.add("polynomial")
@dataclass(frozen=True)
class Polynomial:
    """The peak times (end_factor + (1 - end_factor) * r**power), where r is the share of steps that remain.

    Steps are counted from the end of the warm-up. You et al. 2017 (arXiv:1708.03888) use a power of 2 for LARS.
    """

    power: Annotated[float, Range(0, 100, above=True)] = 2.0
    """Schedule "polynomial": the exponent; 1 is a straight line."""
    end_factor: Share = 0.0

    def make(self, config: "Config", steps: Steps) -> "optax.Schedule":
        peak = config.optimizer.learning_rate
        return optax.polynomial_schedule(peak, peak * self.end_factor, self.power, steps.after_warmup)


@SCHEDULES.add("step")
@dataclass(frozen=True)
class StepDecay:
    """The peak, multiplied by `step_factor` after each share of the run in `step_at`."""

    step_at: tuple[Share, ...] = (1 / 3, 2 / 3, 8 / 9)
    """Schedule "step": the fractions of the run at which the rate is multiplied by `step_factor`."""
    step_factor: Share = 0.1
    """Schedule "step": the factor applied at each step of the schedule."""

    def make(self, config: "Config", steps: Steps) -> "optax.Schedule":
        boundaries: dict[int, float] = {}
        for share in self.step_at:
            # In a short run two shares may give the same step, whose factors multiply.
            boundary = round(share * steps.total) - steps.warmup
            boundaries[boundary] = boundaries.get(boundary, 1.0) * self.step_factor
        return optax.piecewise_constant_schedule(config.optimizer.learning_rate, boundaries)


@SCHEDULES.add("one_cycle")
def one_cycle(config: "Config", steps: Steps) -> "optax.Schedule":
    """Return the 1cycle policy (Smith & Topin 2017, arXiv:1708.07120). The rise is the warm-up, usually 30% of the run.

    After the warm-up the learning rate falls linearly to 1/25 of the peak. Over the final steps (15% of the run with a
    warm-up of 30%) it falls linearly to 1/250,000 of the peak. The momentum is constant.
    """
    peak, remaining = config.optimizer.learning_rate, steps.after_warmup
    fall_steps = max(int(_FALL * remaining), 1)
    fall = optax.linear_schedule(peak, peak * _BEGIN, fall_steps)
    final_fall = optax.linear_schedule(peak * _BEGIN, peak * _END, max(remaining - fall_steps, 1))
    return optax.join_schedules([fall, final_fall], [fall_steps])


@SCHEDULES.add("wsd")
@dataclass(frozen=True)
class WarmupStableDecay:
    """The peak, with a linear fall to `end_factor` times the peak over the last `decay_share` of the run.

    Source: Hu et al. 2024 (arXiv:2404.06395), with the linear decay of Hägele et al. 2024 (arXiv:2405.18392). If the
    decay is longer than the run after the warm-up, it takes all steps after the warm-up.
    """

    decay_share: Share = 0.2
    """Schedule "wsd": the fraction of the run, at its end, over which the rate decays."""
    end_factor: Share = 0.0

    def make(self, config: "Config", steps: Steps) -> "optax.Schedule":
        peak, decay_steps = config.optimizer.learning_rate, round(self.decay_share * steps.total)
        decay_steps = min(decay_steps, steps.after_warmup)
        stable, fall = optax.constant_schedule(peak), optax.linear_schedule(peak, peak * self.end_factor, decay_steps)
        return optax.join_schedules([stable, fall], [steps.after_warmup - decay_steps]) if decay_steps else stable


@SCHEDULES.add("plateau")
@dataclass(frozen=True)
class OnPlateau:
    """The peak, which `jaxddp.engine.parts.configured.Plateau` lowers after validations."""

    plateau_factor: HeldOut = 0.1
    """Schedule "plateau": the factor applied when the validation loss stops improving."""
    plateau_patience: Period = 10
    """Schedule "plateau": the number of validations without improvement before the rate is reduced."""
    end_factor: Share = 0.0

    def make(self, config: "Config", steps: Steps) -> "optax.Schedule":
        return constant(config, steps)
