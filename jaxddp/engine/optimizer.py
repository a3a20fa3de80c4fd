"""Call an optimizer in a step, and wrap optimizers for layers that are frozen, train later or have their own rate.

optax's wrappers cannot be used. `partition`, `mask` and `selective_transform` add levels to the optimizer's state, so
existing checkpoints would not load. `conditionally_mask` does not update Adam's moments while its condition is false.
All four wrappers make the two sequences of a schedule-free optimizer inconsistent.

A schedule-free optimizer (Defazio et al. 2024, arXiv:2405.15682), also within other optimizers, updates the iterates z.
Their average is x, and gradients are computed at y = beta x + (1 - beta) z. The trained parameters are y. The
optimizer's state holds z, and x is computed from y and z. Steps are scaled so that all three sequences stay consistent.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState, schedule_free_eval_params

from jaxddp.config.layers import Layers
from jaxddp.core.errors import InputError, kind_of
from jaxddp.kernels import path_of
from jaxddp.models.interface import without_frozen

_MISSING = re.compile(r"missing \d+ required (?:keyword-only|positional) argument|must be provided")
_REFUSED = re.compile("unexpected keyword argument '(value|grad)'")
StepFactor = Callable[[str], Any]
"""A function of a parameter's path that returns the factor of the parameter's steps, 0 or more."""


def call_update(
    optimizer: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any, *, value: jax.Array, grad: Any
) -> tuple[Any, Any]:
    """Call an optimizer's `update`, and return the updates and its next state.

    An `optax.GradientTransformationExtraArgs` also gets `value` and `grad` as keyword arguments.

    Args:
        value: the mean loss over the global batch, float[], the same on every device.
        grad: the averaged gradient, before any optional part of the step changes it.

    Raises: InputError if the optimizer needs another argument, such as the `value_fn` of a line search.
    """
    takes_more = isinstance(optimizer, optax.GradientTransformationExtraArgs)
    extra: Any = {"value": value, "grad": grad} if takes_more else {}
    try:
        # optax promotes its counters, which `jax_numpy_dtype_promotion` may forbid.
        with jax.numpy_dtype_promotion("standard"):
            result = optimizer.update(grads, opt_state, params, **extra)
    except (TypeError, ValueError) as error:
        if takes_more and _REFUSED.search(str(error)):
            # The update takes no extra arguments, contrary to its type, as in `optax.contrib.sam`.
            plain = optax.GradientTransformation(*optimizer)
            return call_update(plain, grads, opt_state, params, value=value, grad=grad)
        if not _MISSING.search(str(error)):
            raise
        passed = "only value (the mean loss) and grad (its gradient) to an optax.GradientTransformationExtraArgs"
        advice = f"the step passes {passed}; choose an optimizer that needs no other argument"
        raise InputError(f"optimizer: {str(error).rstrip('.')}", advice=advice) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(f"optimizer: its update returned {kind_of(result)}; return a pair (updates, state)")
    return result


class Thawing(NamedTuple):
    """The state of `thawing`."""

    updates: jax.Array
    """int32[], the number of updates so far."""
    inner: Any
    """The state of the wrapped optimizer."""


def only_trained(optimizer: optax.GradientTransformation, frozen: Layers) -> optax.GradientTransformation:
    """Wrap an optimizer so that it keeps no state for frozen parameters and returns None for their updates."""
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        grad = {"grad": without_frozen(extra["grad"], frozen)} if "grad" in extra else {}
        return inner.update(without_frozen(updates, frozen), state, without_frozen(params, frozen), **{**extra, **grad})

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(without_frozen(params, frozen)), update)


def with_factors(optimizer: optax.GradientTransformation, factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Wrap an optimizer so that each parameter's update is multiplied by the factor of its path, 1 by default.

    A factor scales both the learning rate of a parameter and its weight decay.
    """
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, next_state = inner.update(updates, state, params, **extra)
        return scale_updates(updates, state, next_state, lambda path: factors.get(path, 1))

    return optax.GradientTransformationExtraArgs(inner.init, update)


def thawing(optimizer: optax.GradientTransformation, first_steps: Mapping[str, int]) -> optax.GradientTransformation:
    """Wrap an optimizer so that a parameter is trained only from the step that `first_steps` gives for its path.

    Before this step the parameter does not change, but the optimizer receives its gradients. Without these gradients
    Adam's moments would be zero at the first step, when the bias correction no longer has an effect. The first updates
    would then be several times too large. The count of steps is the number of calls of `update`, as for the learning
    rate.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Thawing:
        return Thawing(jnp.zeros((), jnp.int32), optimizer.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Thawing]:
        def is_trained(path: str) -> Any:
            step = first_steps.get(path, 0)
            return jnp.where(state.updates < step, 0, 1) if step else 1

        def mask(path: Any, leaf: jax.Array) -> jax.Array:
            step = first_steps.get(path_of(path), 0)
            # The update is -0, because x + (-0) keeps the bits of every x. An update of 0 would change -0 to 0.
            return leaf if not step else jnp.where(state.updates < step, jnp.asarray(-0.0, leaf.dtype), leaf)

        updates, inner = optimizer.update(updates, state.inner, params, **extra)
        if is_schedule_free(inner):
            updates, inner = scale_steps(updates, state.inner, inner, is_trained)
        return jax.tree_util.tree_map_with_path(mask, updates), Thawing(state.updates + 1, inner)

    return optax.GradientTransformationExtraArgs(init, update)


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
    return [state for _, state in optax.tree_utils.tree_get_all_with_path(opt_state, ScheduleFreeState.__name__)]


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
