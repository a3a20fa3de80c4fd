"""Support for schedule-free optimizers (Defazio et al. 2024, arXiv:2405.15682), also within other optimizers.

Such an optimizer takes steps z, averages them as x, and computes gradients at y = beta x + (1 - beta) z. The trained
parameters are y. The optimizer's state holds z, and x is computed from y and z. This module keeps x beside y for
evaluation, and scales steps so that all three sequences stay consistent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState, schedule_free_eval_params

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.engine.parts.lookahead import Lookahead
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import EVAL_PARAMS, TrainState
from jaxddp.models.variables import path_of

StepFactor = Callable[[str], Any]
"""A function of a parameter's path that returns the factor of its steps, 0 or more."""


@dataclass(frozen=True)
class ScheduleFreeAverage(Part):
    """Keeps x in the state, so that evaluation, prediction and export need no optimizer.

    It is added automatically if there is a schedule-free optimizer, from a config or from Python. Running statistics of
    batch norm are measured with the parameters y.
    """

    name: str = "schedule_free"

    def init(self, params: Any, model_state: Any) -> Any:
        # Copy, because a donated state must not hold a buffer twice.
        return {EVAL_PARAMS: jax.tree.map(jnp.copy, params)}

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        return {EVAL_PARAMS: averaged(after.opt_state, after.params)}, after


def with_average(parts: Sequence[Part], opt_state: Any) -> tuple[Part, ...]:
    """Add a `ScheduleFreeAverage` to the parts, before any guard, if the optimizer is schedule-free.

    Args:
        opt_state: the optimizer's state, or its shapes.

    Raises:
        InputError: the parts already include a parameter average; or they include Lookahead, which would change y
            without z.
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


def is_schedule_free(opt_state: Any) -> bool:
    """Tell whether an optimizer's state, or its shapes, includes that of a schedule-free optimizer."""
    return bool(_states(opt_state))


def averaged(opt_state: Any, params: Any) -> Any:
    """Return the parameters x for evaluation. A parameter without a schedule-free optimizer is returned unchanged."""
    averages = dict[str, jax.Array]()
    for state in _states(opt_state):
        z = _by_path(state.z)
        y = {path: leaf for path, leaf in _by_path(params).items() if path in z}
        averages |= schedule_free_eval_params(state._replace(z=z), y)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: averages.get(path_of(path), leaf), params)


def multiplied(updates: Any, before: Any, after: Any, factor: StepFactor) -> tuple[Any, Any]:
    """Scale the updates of any optimizer by factors; return the updates and the next state. See `with_steps`."""
    if is_schedule_free(after):
        return with_steps(updates, before, after, factor)

    def product(path: Any, update: jax.Array) -> jax.Array:
        return update * jnp.asarray(factor(path_of(path)), update.dtype)

    return jax.tree_util.tree_map_with_path(product, updates), after


def with_steps(updates: Any, before: Any, after: Any, factor: StepFactor) -> tuple[Any, Any]:
    """Scale the steps of schedule-free optimizers by factors; return the updates of y and the next state.

    Scaling the updates of y alone would make z inconsistent with y, and x wrong. With a factor of 0 neither y nor z
    moves.

    Args:
        updates: the optimizer's updates of y.
        before: the optimizer's state before the update.
        after: the state that the optimizer returned.
    """
    corrections = dict[str, tuple[jax.Array, Any]]()

    def scaled(old: Any, new: Any) -> Any:
        if not isinstance(old, ScheduleFreeState):
            return new
        # The weight of the newest z in x.
        total: Any = new.weight_sum
        share = jnp.where(total > 0, (total - old.weight_sum) / total, 0)
        into_y = old.b1 * share + 1 - old.b1

        def step(path: Any, z: jax.Array, following: jax.Array) -> jax.Array:
            times = factor(path_of(path))
            corrections[path_of(path)] = into_y * (times - 1) * (following - z), times
            return jnp.where(times == 1, following, z + times * (following - z))

        return new._replace(z=jax.tree_util.tree_map_with_path(step, old.z, new.z))

    state = jax.tree.map(scaled, before, after, is_leaf=lambda node: isinstance(node, ScheduleFreeState))

    def corrected(path: Any, update: jax.Array) -> jax.Array:
        if path_of(path) not in corrections:
            return update
        more, times = corrections[path_of(path)]
        # The update is minus zero: x + -0 keeps the bits of every x, but -0 + 0 is 0.
        return jnp.where(times == 0, -0.0, update + more).astype(update.dtype)

    return jax.tree_util.tree_map_with_path(corrected, updates), state


def _states(opt_state: Any) -> list[Any]:
    name = ScheduleFreeState.__name__
    return [state for _, state in optax.tree_utils.tree_get_all_with_path(opt_state, name)]


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
