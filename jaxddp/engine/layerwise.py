"""Optimizer wrappers for layers that are frozen, that train from a later step on, or that have their own learning rate.

optax's wrappers cannot be used. `partition`, `mask` and `selective_transform` add levels to the optimizer's state, so
existing checkpoints would not load. `conditionally_mask` does not update Adam's moments while its condition is false.
All four wrappers make the two sequences of a schedule-free optimizer inconsistent.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxddp.engine.optimizer import is_schedule_free, scale_steps, scale_updates
from jaxddp.models.variables import path_of, without_frozen
from jaxddp.sections.layers import Layers


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
