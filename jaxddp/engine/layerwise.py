"""Optimizer wrappers for layers that are frozen, that train from a later step on, or that have their own learning rate.

optax's wrappers do not fit. `partition`, `masked` and `selective_transform` add levels to the optimizer's state, so
existing checkpoints would not load. `conditionally_mask` does not update Adam's moments while its condition is false.
None of these wrappers keeps the two sequences of a schedule-free optimizer consistent.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxddp.engine.parts.iterate_average import is_schedule_free, multiplied, with_steps
from jaxddp.models.frozen import trained
from jaxddp.models.variables import path_of
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
        grad = {"grad": trained(extra["grad"], frozen)} if "grad" in extra else {}
        return inner.update(trained(updates, frozen), state, trained(params, frozen), **{**extra, **grad})

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(trained(params, frozen)), update)


def with_factors(optimizer: optax.GradientTransformation, factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Wrap an optimizer so that each parameter's update is multiplied by a factor, given by path.

    A factor scales both the learning rate of a parameter and its weight decay.
    """
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, following = inner.update(updates, state, params, **extra)
        return multiplied(updates, state, following, lambda path: factors.get(path, 1))

    return optax.GradientTransformationExtraArgs(inner.init, update)


def thawing(optimizer: optax.GradientTransformation, begins: Mapping[str, int]) -> optax.GradientTransformation:
    """Wrap an optimizer so that some parameters, given by path, train only from a step on.

    Before that step no bit of these parameters changes. The optimizer receives their gradients from the start.
    Otherwise the moments would be zero at that step, when Adam's bias correction no longer has an effect, and the first
    updates would be several times too large. Steps are counted by calls of `update`, as for the learning rate.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Thawing:
        return Thawing(jnp.zeros((), jnp.int32), optimizer.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Thawing]:
        def has_begun(path: str) -> Any:
            step = begins.get(path, 0)
            return jnp.where(state.updates < step, 0, 1) if step else 1

        def begun(path: Any, leaf: jax.Array) -> jax.Array:
            step = begins.get(path_of(path), 0)
            # The update is minus zero: x + -0 keeps the bits of every x, but -0 + 0 is 0.
            return leaf if not step else jnp.where(state.updates < step, jnp.asarray(-0.0, leaf.dtype), leaf)

        updates, inner = optimizer.update(updates, state.inner, params, **extra)
        if is_schedule_free(inner):
            updates, inner = with_steps(updates, state.inner, inner, has_begun)
        return jax.tree_util.tree_map_with_path(begun, updates), Thawing(state.updates + 1, inner)

    return optax.GradientTransformationExtraArgs(init, update)
