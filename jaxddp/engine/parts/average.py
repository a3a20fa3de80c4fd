"""An exponential moving average (EMA) of the parameters. Validation measures both the parameters and their average."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.core.ranges import Decay, Period
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import EVAL_PARAMS, TrainState
from jaxddp.overrides import check_values


@dataclass(frozen=True)
class ParameterAverage(Part):
    """An exponential moving average of the parameters that starts at the fresh parameters.

    The decay of step t, which starts at 0, warms up as min(decay, (1 + t)/(10 + t)), like TensorFlow's
    `ExponentialMovingAverage`. So the fresh parameters have little weight even after a short run. If `every` is K, the
    average is updated after each K-th step with the decay to the power of K. So the average covers the same number of
    steps for every K. (torchvision's references and pycls multiply 1 - decay by K, which is equal to first order.)

    Evaluation of the average uses the model state of the trained parameters, such as batch norm statistics.

    Attributes:
        decay: the decay of one step, 0 <= decay < 1.
        every: the number of steps between updates, at least 1.
        warmup: whether the decay warms up.

    Raises:
        InputError: a value is out of range.
    """

    decay: Decay
    name: str = "average"
    every: Period = 1
    warmup: bool = True
    beside = True

    def __post_init__(self) -> None:
        check_values(self, "ParameterAverage: ")

    def init(self, params: Any, model_state: Any) -> Any:
        # Copy, because a donated state must not hold a buffer twice.
        return {EVAL_PARAMS: jax.tree.map(jnp.copy, params)}

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        step = before.step.astype(jnp.float32)
        decay = jnp.minimum(self.decay, (1 + step) / (10 + step)) if self.warmup else jnp.float32(self.decay)
        if self.every > 1:
            decay = decay**self.every

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            moved = old + (1 - decay).astype(new.dtype) * (new - old)
            return moved if self.every == 1 else jnp.where(after.step % self.every == 0, moved, old)

        return {EVAL_PARAMS: jax.tree.map(average, own[EVAL_PARAMS], after.params)}, after
