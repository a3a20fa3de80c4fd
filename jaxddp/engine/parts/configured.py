"""The parts of the step that a config enables, and the rate that follows its validations (`Plateau`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.config import Config
from jaxddp.config.registry import SCHEDULES
from jaxddp.config.values import check_values
from jaxddp.core.errors import InputError, Key, counted
from jaxddp.core.ranges import HeldOut, Period, Share
from jaxddp.engine.parts.averages import LastAverage, Lookahead, ParameterAverage
from jaxddp.engine.parts.guard import GradientNorm, Guard, LossScale
from jaxddp.engine.parts.part import Part
from jaxddp.schedules import Steps

_THRESHOLD = 1e-4


@dataclass(frozen=True)
class Plateau(Part):
    """Applies the rule of `optax.contrib.reduce_on_plateau` to the validations of a run, for any optimizer.

    Updates are multiplied by a scale, which starts at 1. After `patience` validations in a row without improvement the
    scale is multiplied by `factor`, down to `least`, and the count of validations starts again. A validation is an
    improvement if its loss is below the best loss by a relative 1e-4, as in PyTorch's `ReduceLROnPlateau`. (With the
    same patience, PyTorch waits one validation longer.) A loss that is not finite is no improvement.

    Attributes:
        factor: the factor of each reduction, above 0 and below 1.
        patience: the number of validations without improvement before a reduction, at least 1.
        least: the smallest scale, from 0 to 1.

    Raises: InputError if a value is out of range.
    """

    factor: HeldOut = 0.1
    patience: Period = 10
    least: Share = 0.0
    name: str = "plateau"
    follows = True

    def __post_init__(self) -> None:
        check_values(self, "Plateau: ")

    @cached_property
    def _rule(self) -> optax.GradientTransformationExtraArgs:
        return optax.contrib.reduce_on_plateau(self.factor, self.patience, _THRESHOLD, min_scale=self.least)

    def init(self, params: Any, model_state: Any) -> Any:
        """Return {"rule": optax's state}. Its `scale`, float32[], is the factor of the learning rate."""
        rule: Any = self._rule.init(jnp.zeros((), jnp.float32))
        # Optax starts with infinity as the best loss, but a part's arrays with an infinity are not saved.
        return {"rule": rule._replace(best_value=jnp.float32(jnp.finfo(jnp.float32).max))}

    def rate_factor(self, own: Any) -> jax.Array:
        return own["rule"].scale

    def validated(self, own: Any, metrics: Mapping[str, jax.Array]) -> Any:
        _, rule = self._rule.update({}, own["rule"], value=metrics["val loss"])
        return {"rule": rule}


def configured_parts(config: Config, steps: Steps) -> tuple[Part, ...]:
    """Create the optional parts of the step that a config enables.

    The moving average comes after Lookahead, so that it averages the result of Lookahead. The guard comes after both,
    so that it can restore their arrays. `jaxddp.setup.user_objects.parts_of` adds the parts that a user provides.
    """
    settings, clip, parts = config.train, config.optimizer.clip_norm, list[Part]()
    if clip is not None or config.log.gradient_norm:
        parts.append(GradientNorm(clip))
    if settings.lookahead is not None:
        if settings.lookahead > steps.total:
            problem = f": the run of {counted(steps.total, 'step')} would end with its initial parameters"
            raise InputError(Key("train.lookahead", settings.lookahead), problem, advice=f"give at most {steps.total}")
        parts.append(Lookahead(settings.lookahead, optax.constant_schedule(settings.lookahead_decay), steps.total))
    if settings.ema is not None:
        parts.append(ParameterAverage(settings.ema, every=settings.ema_every, warmup=settings.ema_warmup))
    if settings.swa is not None:
        if settings.ema is not None:
            raise InputError(Key("train.swa"), " and ", Key("train.ema"), " are given", advice="leave one of them out")
        parts.append(LastAverage(first=max(0, steps.total - steps.averaged)))
    if config.optimizer.schedule == "plateau":
        plateau = SCHEDULES.settings(config.optimizer)
        parts.append(Plateau(plateau.plateau_factor, plateau.plateau_patience, plateau.end_factor))
    if settings.max_bad_steps or settings.precision == "float16":
        parts.append(Guard())
    if settings.precision == "float16":
        parts.append(LossScale(settings.batch_size))
    return tuple(parts)
