"""Support for schedule-free optimizers (Defazio et al. 2024, arXiv:2405.15682), also within other optimizers.

A schedule-free optimizer updates the iterates z. Their average is x, and gradients are computed at
y = beta x + (1 - beta) z. The trained parameters are y. The optimizer's state holds z, and x is computed from y and z.
This module adds x to the state for evaluation, and scales steps so that all three sequences stay consistent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState, schedule_free_eval_params

from jaxddp.core.errors import InputError, Key
from jaxddp.engine.parts.lookahead import Lookahead
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import EVAL_PARAMS, TrainState
from jaxddp.models.variables import path_of

StepFactor = Callable[[str], Any]
"""A function of a parameter's path that returns the factor of the parameter's steps, 0 or more."""


@dataclass(frozen=True)
class ScheduleFreeAverage(Part):
    """Keeps x in the state, so that evaluation, prediction and export need no optimizer.

    This part is added automatically if the optimizer is schedule-free. The running statistics of batch norm are those
    of the network with the parameters y.
    """

    name: str = "schedule_free"

    def init(self, params: Any, model_state: Any) -> Any:
        # Copy, because a donated state must not hold a buffer twice.
        return {EVAL_PARAMS: jax.tree.map(jnp.copy, params)}

    def update(self, own: Any, before: TrainState, after: TrainState, grads: Any) -> tuple[Any, TrainState]:
        return {EVAL_PARAMS: compute_average(after.opt_state, after.params)}, after


def with_average(parts: Sequence[Part], opt_state: Any) -> tuple[Part, ...]:
    """Add a `ScheduleFreeAverage` to the parts, before any guard, if the optimizer is schedule-free.

    Args:
        opt_state: the optimizer's state, or its shapes.

    Raises:
        InputError: the parts already include a parameter average, or they include Lookahead, which changes y but not z.
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
    other_parts, judging_parts = ([part for part in parts if part.judges is judges] for judges in (False, True))
    return (*other_parts, ScheduleFreeAverage(), *judging_parts)


def is_schedule_free(opt_state: Any) -> bool:
    """Return whether an optimizer's state, or its shapes, includes the state of a schedule-free optimizer."""
    return bool(_states(opt_state))


def compute_average(opt_state: Any, params: Any) -> Any:
    """Return the parameters x for evaluation. Parameters of other optimizers are returned unchanged."""
    averages = dict[str, jax.Array]()
    for state in _states(opt_state):
        z = _by_path(state.z)
        y = {path: leaf for path, leaf in _by_path(params).items() if path in z}
        averages |= schedule_free_eval_params(state._replace(z=z), y)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: averages.get(path_of(path), leaf), params)


def scale_updates(updates: Any, before: Any, after: Any, factor: StepFactor) -> tuple[Any, Any]:
    """Scale the updates of any optimizer by factors; return the updates and the next state. See `scale_steps`."""
    if is_schedule_free(after):
        return scale_steps(updates, before, after, factor)

    def product(path: Any, update: jax.Array) -> jax.Array:
        return update * jnp.asarray(factor(path_of(path)), update.dtype)

    return jax.tree_util.tree_map_with_path(product, updates), after


def scale_steps(updates: Any, before: Any, after: Any, factor: StepFactor) -> tuple[Any, Any]:
    """Scale the steps of schedule-free optimizers by factors; return the updates of y and the next state.

    Scaling the updates of y alone would make z inconsistent with y, and x wrong. A factor of 0 leaves y and z
    unchanged.

    Args:
        updates: the optimizer's updates of y.
        before: the optimizer's state before the update.
        after: the state that the optimizer returned.
    """
    corrections = dict[str, tuple[jax.Array, Any]]()

    def scale(old: Any, new: Any) -> Any:
        if not isinstance(old, ScheduleFreeState):
            return new
        # The weight of the newest z in x.
        total: Any = new.weight_sum
        share = jnp.where(total > 0, (total - old.weight_sum) / total, 0)
        weight_in_y = old.b1 * share + 1 - old.b1

        def step(path: Any, z: jax.Array, next_z: jax.Array) -> jax.Array:
            times = factor(path_of(path))
            corrections[path_of(path)] = weight_in_y * (times - 1) * (next_z - z), times
            return jnp.where(times == 1, next_z, z + times * (next_z - z))

        return new._replace(z=jax.tree_util.tree_map_with_path(step, old.z, new.z))

    state = jax.tree.map(scale, before, after, is_leaf=lambda node: isinstance(node, ScheduleFreeState))

    def correct(path: Any, update: jax.Array) -> jax.Array:
        if path_of(path) not in corrections:
            return update
        correction, times = corrections[path_of(path)]
        # The update is -0, because x + (-0) keeps the bits of every x. An update of 0 would change -0 to 0.
        return jnp.where(times == 0, -0.0, update + correction).astype(update.dtype)

    return jax.tree_util.tree_map_with_path(correct, updates), state


def _states(opt_state: Any) -> list[Any]:
    name = ScheduleFreeState.__name__
    return [state for _, state in optax.tree_utils.tree_get_all_with_path(opt_state, name)]


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
