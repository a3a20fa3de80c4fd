"""What evaluation measures of a schedule-free optimizer: the average x, in place of the trained parameters y."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.engine.parts.lookahead import Lookahead
from jaxddp.engine.parts.part import Part
from jaxddp.engine.schedule_free_state import averaged, is_schedule_free
from jaxddp.engine.state import EVAL_PARAMS, TrainState


@dataclass(frozen=True)
class ScheduleFreeAverage(Part):
    """Keeps x beside y, so that who evaluates, predicts or exports a state needs no optimizer.

    It joins by itself wherever there is a schedule-free optimizer, that of a config or an object. Running statistics of
    batch norm are those of y.
    """

    name: str = "schedule_free"

    def init(self, params: Any, model_state: Any) -> Any:
        # Copies: a donated state must not hold a buffer twice.
        return {EVAL_PARAMS: jax.tree.map(jnp.copy, params)}

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        return {EVAL_PARAMS: averaged(after.opt_state, after.params)}, after


def with_average(parts: Sequence[Part], opt_state: Any) -> tuple[Part, ...]:
    """The parts with this one, the last before a guard, where an optimizer's state, or one of shapes, needs it.

    Raises: InputError; there is an average already, or slow weights, which would leave the optimizer's steps behind.
    """
    if not is_schedule_free(opt_state):
        return tuple(parts)
    if any(part.beside for part in parts):
        raise InputError(
            Key("train.ema"),
            ": a schedule-free optimizer averages its parameters itself",
            advice="leave one of them out",
        )
    if any(isinstance(part, Lookahead) for part in parts):
        raise InputError(
            Key("train.lookahead"),
            ": a schedule-free optimizer averages its steps itself",
            advice="leave one of them out",
        )
    quiet, judging = ([part for part in parts if part.judges is judges] for judges in (False, True))
    return (*quiet, ScheduleFreeAverage(), *judging)
