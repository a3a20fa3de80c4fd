"""Compute a batch in equal parts, one after the other, so that only one part's activations are in memory.

A loop does this, except on CPUs. There XLA's convolutions are slow inside loops
(https://github.com/jax-ml/jax/issues/12868), so the loop is unrolled and the program grows with the number of parts.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxddp.data.batch import Batch

Carry = TypeVar("Carry")


def in_parts(
    take: Callable[[Carry, Batch, jax.Array], tuple[Carry, Any]],
    carry: Carry,
    batch: Batch,
    count: int,
    *,
    unrolled: bool,
) -> tuple[Carry, Any]:
    """Call `take(carry, part, number)` for `count` equal parts of a batch; see `in_turn`."""
    parts = jax.tree.map(lambda column: column.reshape(count, -1, *column.shape[1:]), batch)

    def take_part(carry: Carry, number: jax.Array | int) -> tuple[Carry, Any]:
        part = jax.tree.map(lambda column: lax.dynamic_index_in_dim(column, number, keepdims=False), parts)
        return take(carry, part, jnp.asarray(number))

    return in_turn(take_part, carry, count, unrolled=unrolled)


def in_turn(
    take: Callable[[Carry, jax.Array | int], tuple[Carry, Any]], carry: Carry, count: int, *, unrolled: bool = False
) -> tuple[Carry, Any]:
    """Call `take(carry, number)` for the numbers 0 to `count` - 1; return the last carry and the stacked results.

    This is `lax.scan`, except for a single call or where the loop is `unrolled`.
    """
    if count == 1:
        carry, result = take(carry, 0)
        return carry, jax.tree.map(lambda values: values[None], result)
    if not unrolled:
        return lax.scan(take, carry, jnp.arange(count))
    results: list[Any] = []
    for number in range(count):
        carry, result = take(carry, number + zero_after((carry, results[-1:])))
        results.append(result)
    return carry, jax.tree.map(lambda *columns: jnp.stack(columns), *results)


def merged(states: Any) -> Any:
    """Merge the model states of several parts, [parts, ...]: the mean of floats, the maximum of counters."""
    floating = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.mean(0) if floating(leaf) else leaf.max(0), states)


def zero_after(tree: Any) -> jax.Array:
    """Return a 0, int32[], that depends on a tree. XLA computes the tree before operations that use this 0.

    XLA's CPU compiler removes barriers and orders operations by the use of their results alone. Without the dependence
    it would compute all forward passes first and keep the activations of all parts.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size]
    return functools.reduce(jnp.add, [(leaf.ravel()[0] > jnp.inf).astype(jnp.int32) for leaf in leaves], jnp.int32(0))
