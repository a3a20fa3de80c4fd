"""Optimizers and learning-rate schedules of a config, made of optax's."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxddp.config import OptimizerConfig
from jaxddp.errors import InputError
from jaxddp.wording import choices


def make_schedule(config: OptimizerConfig, *, total_steps: int, warmup_steps: int) -> optax.Schedule:
    """The learning rate as a function of the step, 0 for the first.

    It rises linearly to the peak over the warm-up, beginning at peak / warmup_steps so that no step is wasted, and then
    follows the named schedule over the rest of the run: "cosine" (to 0, Loshchilov & Hutter, arXiv:1608.03983),
    "step" (times `step_factor` at each share `step_at` of the run) or "constant".

    Raises:
        InputError: an unknown name, or a warm-up longer than the run.
    """
    if warmup_steps > total_steps:
        raise InputError(
            f'optimizer.warmup="{config.warmup}" is {warmup_steps} steps, longer than the run of {total_steps}; '
            'shorten it, or give it in percent ("5%")'
        )
    if config.schedule not in _SCHEDULES:
        raise InputError(f"optimizer.schedule={config.schedule!r} is unknown; {choices(config.schedule, _SCHEDULES)}")
    after = _SCHEDULES[config.schedule](config, total_steps, warmup_steps)
    if not warmup_steps:
        return after
    peak = config.learning_rate
    rise = optax.linear_schedule(peak / warmup_steps, peak, max(warmup_steps - 1, 1))
    return optax.join_schedules([rise, after], [warmup_steps])


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The named optimizer: "momentum" (weight decay enters the gradient, as for the ResNets) or "adamw" (decoupled).

    Raises:
        InputError: an unknown name.
    """
    if config.name not in _OPTIMIZERS:
        raise InputError(f"optimizer.name={config.name!r} is unknown; {choices(config.name, _OPTIMIZERS)}")
    return _OPTIMIZERS[config.name](config, schedule)


def decayed(params: Any) -> Any:
    """Which parameters weight decay applies to: kernels, but no bias and no scale of a normalization (He et al.,
    arXiv:1812.01187, section 3.1); those are the vectors."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _cosine(config: OptimizerConfig, total: int, warmup: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(config.learning_rate, max(total - warmup, 1))


def _steps(config: OptimizerConfig, total: int, warmup: int) -> optax.Schedule:
    boundaries: dict[int, float] = {}
    for share in config.step_at:
        # In a short run two shares may fall on one step.
        boundary = round(share * total) - warmup
        boundaries[boundary] = boundaries.get(boundary, 1.0) * config.step_factor
    return optax.piecewise_constant_schedule(config.learning_rate, boundaries)


def _constant(config: OptimizerConfig, total: int, warmup: int) -> optax.Schedule:
    return optax.constant_schedule(config.learning_rate)


def _momentum(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.sgd(schedule, momentum=config.momentum, nesterov=config.nesterov),
    )


def _adamw(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(schedule, b1=config.momentum, b2=config.beta2, weight_decay=config.weight_decay, mask=decayed)


_SCHEDULES: dict[str, Callable[[OptimizerConfig, int, int], optax.Schedule]] = {
    "cosine": _cosine,
    "step": _steps,
    "constant": _constant,
}
_OPTIMIZERS: dict[str, Callable[[OptimizerConfig, optax.Schedule], optax.GradientTransformation]] = {
    "momentum": _momentum,
    "adamw": _adamw,
}
