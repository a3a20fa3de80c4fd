"""Schedule-free optimizers (Defazio et al. 2024, arXiv:2405.15682), wherever in an optimizer's state one is.

Such an optimizer takes steps z, averages them as x, and has its gradients at y = beta x + (1 - beta) z. The parameters
that are trained are y; z is in its state, and x follows from both. Here x is kept beside y for evaluation, and steps
at other learning rates move all three.
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

Factor = Callable[[str], Any]
"""Of a parameter's path, what its steps are multiplied by, from 0 to 1 or more."""


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


def is_schedule_free(opt_state: Any) -> bool:
    """Whether a state, which may be one of shapes, holds that of a schedule-free optimizer."""
    return bool(_states(opt_state))


def averaged(opt_state: Any, params: Any) -> Any:
    """The parameters x, which are to be measured; `params` itself where no schedule-free optimizer trains it."""
    found = dict[str, jax.Array]()
    for state in _states(opt_state):
        z = _by_path(state.z)
        own = {path: leaf for path, leaf in _by_path(params).items() if path in z}
        found |= schedule_free_eval_params(state._replace(z=z), own)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: found.get(path_of(path), leaf), params)


def multiplied(updates: Any, before: Any, after: Any, factor: Factor) -> tuple[Any, Any]:
    """The updates of any optimizer, and its next state, at rates that are multiplied by factors; see `with_steps`."""
    if is_schedule_free(after):
        return with_steps(updates, before, after, factor)

    def product(path: Any, update: jax.Array) -> jax.Array:
        return update * jnp.asarray(factor(path_of(path)), update.dtype)

    return jax.tree_util.tree_map_with_path(product, updates), after


def with_steps(updates: Any, before: Any, after: Any, factor: Factor) -> tuple[Any, Any]:
    """The updates and the next state of schedule-free optimizers whose steps were multiplied by factors.

    Updates of y that were multiplied by themselves would leave z behind or ahead, and x, which follows from both,
    anywhere. With a factor of 0 neither moves.

    Args:
        updates: of y, as the optimizer gave them, with the state that it was given and the one that it returned.
    """
    corrections = dict[str, tuple[jax.Array, Any]]()

    def scaled(old: Any, new: Any) -> Any:
        if not isinstance(old, ScheduleFreeState):
            return new
        # The share of the newest z in x.
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
        # Minus zero: x + -0 has the bits of x, and -0 + 0 has not those of -0.
        return jnp.where(times == 0, -0.0, update + more).astype(update.dtype)

    return jax.tree_util.tree_map_with_path(corrected, updates), state


def _states(opt_state: Any) -> list[Any]:
    name = ScheduleFreeState.__name__
    return [state for _, state in optax.tree_utils.tree_get_all_with_path(opt_state, name)]


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
