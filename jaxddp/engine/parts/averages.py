"""Averages of parameters: an exponential moving average, Lookahead, and that of a schedule-free optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.config.values import check_values, checked
from jaxddp.core.errors import InputError, Key
from jaxddp.core.ranges import Decay, Period
from jaxddp.engine.optimizer import compute_average, is_schedule_free
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import EVAL_MODEL_STATE, EVAL_PARAMS, MEASURED_AT, TrainState


class RunningAverage(Part):
    """Parameters for evaluation that move towards the trained parameters of each step."""

    every: int = 1
    beside = True

    def init(self, params: Any, model_state: Any) -> Any:
        own = {EVAL_PARAMS: params}
        if jax.tree.leaves(model_state):
            own |= {EVAL_MODEL_STATE: model_state, MEASURED_AT: jnp.full((), -1, jnp.int32)}
        # Copy, because a donated state must not hold a buffer twice.
        return jax.tree.map(jnp.copy, own)

    def decay_at(self, step: jax.Array) -> jax.Array:
        """Return the decay of an update in a step, float32[], from 0."""
        raise NotImplementedError

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        decay = self.decay_at(before.step.astype(jnp.float32))

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            moved = old + (1 - decay).astype(new.dtype) * (new - old)
            return moved if self.every == 1 else jnp.where(after.step % self.every == 0, moved, old)

        return {**own, EVAL_PARAMS: jax.tree.map(average, own[EVAL_PARAMS], after.params)}, after


@dataclass(frozen=True)
class ParameterAverage(RunningAverage):
    """An exponential moving average of the parameters that starts at the fresh parameters.

    The decay of step t, which starts at 0, warms up as min(decay, (1 + t)/(10 + t)), like TensorFlow's
    `ExponentialMovingAverage`. So the fresh parameters have little weight even after a short run. If `every` is K, the
    average is updated after each K-th step with the decay to the power of K. So the average covers the same number of
    steps for every K. (torchvision's references and pycls multiply 1 - decay by K, which is equal to first order.)

    Until the last step, an evaluation of the average uses the model state of the trained parameters, such as batch norm
    statistics. After it, see `jaxddp.engine.statistics`.

    Attributes:
        decay: the decay of one step, 0 <= decay < 1.
        every: the number of steps between updates, at least 1.
        warmup: whether the decay warms up.

    Raises: InputError if a value is out of range.
    """

    decay: Decay
    name: str = "average"
    every: Period = 1
    warmup: bool = True

    def __post_init__(self) -> None:
        check_values(self, "ParameterAverage: ")

    def decay_at(self, step: jax.Array) -> jax.Array:
        decay = jnp.minimum(self.decay, (1 + step) / (10 + step)) if self.warmup else jnp.float32(self.decay)
        return decay**self.every if self.every > 1 else decay


@dataclass(frozen=True)
class LastAverage(RunningAverage):
    """The mean of the parameters after each of the last steps; before these steps, the trained parameters.

    Source: Izmailov et al. 2018 (SWA, arXiv:1803.05407), where the rate of these steps is constant or cyclical.

    Attributes:
        first: the first averaged step, from 0.
    """

    first: int
    name: str = "average"

    def decay_at(self, step: jax.Array) -> jax.Array:
        return 1 - 1 / jnp.maximum(step - self.first + 1, 1)


@dataclass(frozen=True)
class Lookahead(Part):
    """Lookahead (Zhang et al. 2019, arXiv:1907.08610), with a decay that may change over the run.

    The changing decay is from Jordan 2024 (arXiv:2404.00498, section 3.4). Every `period` steps
    slow = decay * slow + (1 - decay) * trained, and training continues from the slow weights. After the last step of
    the run the slow weights replace the trained weights. The rule applies to the model's running statistics, too. The
    model's other arrays do not change.

    Attributes:
        period: the number of steps between updates of the slow weights.
        decay: a function of the number of completed steps that returns the decay, 0 to 1.
        total_steps: the number of steps of the run.
    """

    period: Period
    decay: optax.Schedule
    total_steps: int
    name: str = "lookahead"

    def __post_init__(self) -> None:
        checked(self.period, Period, "Lookahead: period")

    def init(self, params: Any, model_state: Any) -> Any:
        # Copy, because a donated state must not hold a buffer twice.
        return jax.tree.map(jnp.copy, {"params": params, "model_state": model_state})

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        due, decay = after.step % self.period == 0, jnp.asarray(self.decay(after.step))
        trained = {"params": after.params, "model_state": after.model_state}

        def update_slow(slow: jax.Array, fast: jax.Array) -> jax.Array:
            if not jnp.issubdtype(fast.dtype, jnp.inexact):
                return fast
            return jnp.where(due, fast + decay.astype(fast.dtype) * (slow - fast), slow)

        slow = jax.tree.map(update_slow, own, trained)
        restarts = due | (after.step >= self.total_steps)
        weights = jax.tree.map(lambda slow, fast: jnp.where(restarts, slow, fast), slow, trained)
        return slow, after.replace(params=weights["params"], model_state=weights["model_state"])


@dataclass(frozen=True)
class ScheduleFreeAverage(RunningAverage):
    """Keeps x in the state, so that evaluation, prediction and export need no optimizer.

    This part is added automatically if the optimizer is schedule-free. Until the last step, the running statistics of
    batch norm are those of the network with the parameters y; after it, see `jaxddp.engine.statistics`.
    """

    name: str = "schedule_free"
    beside = False

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        return {**own, EVAL_PARAMS: compute_average(after.opt_state, after.params)}, after


def with_average(parts: Sequence[Part], opt_state: Any) -> tuple[Part, ...]:
    """Add a `ScheduleFreeAverage` to the parts, before any guard, if the optimizer is schedule-free.

    `opt_state` may consist of shapes. Raises: InputError if the parts include another average, or Lookahead, which
    changes y but not z.
    """
    if not is_schedule_free(opt_state):
        return tuple(parts)
    conflicts = [Key("train.swa" if isinstance(part, LastAverage) else "train.ema") for part in parts if part.beside]
    conflicts += [Key("train.lookahead")] if any(isinstance(part, Lookahead) for part in parts) else []
    for key in conflicts:
        problem = ": a schedule-free optimizer averages its parameters itself"
        raise InputError(key, problem, advice="leave one of them out")
    return tuple(sorted([*parts, ScheduleFreeAverage()], key=lambda part: bool(part.judges)))
