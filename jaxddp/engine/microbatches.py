"""Compute a batch in equal parts, one after the other, so that only one part's activations are in memory.

On CPUs XLA's convolutions are slow inside loops (https://github.com/jax-ml/jax/issues/12868). So on CPUs the loop over
the parts is unrolled, and the program grows with the number of parts.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxddp.data.batch import Batch

Carry = TypeVar("Carry")


def scan_parts(
    body: Callable[[Carry, Batch, jax.Array], tuple[Carry, Any]],
    carry: Carry,
    batch: Batch,
    count: int,
    *,
    unrolled: bool,
) -> tuple[Carry, Any]:
    """Call `body(carry, part, number)` for `count` equal parts of a batch; see `scan_range`."""
    parts = jax.tree.map(lambda column: column.reshape(count, -1, *column.shape[1:]), batch)

    def part_body(carry: Carry, number: jax.Array | int) -> tuple[Carry, Any]:
        part = jax.tree.map(lambda column: lax.dynamic_index_in_dim(column, number, keepdims=False), parts)
        return body(carry, part, jnp.asarray(number))

    return scan_range(part_body, carry, count, unrolled=unrolled)


def scan_range(
    body: Callable[[Carry, jax.Array | int], tuple[Carry, Any]], carry: Carry, count: int, *, unrolled: bool = False
) -> tuple[Carry, Any]:
    """Call `body(carry, number)` for the numbers 0 to `count` - 1; return the last carry and the stacked results.

    The loop is `lax.scan`. A single call, or a loop that is `unrolled`, has no `lax.scan`.
    """
    if count == 1:
        carry, result = body(carry, 0)
        return carry, jax.tree.map(lambda values: values[None], result)
    if not unrolled:
        return lax.scan(body, carry, jnp.arange(count))
    results: list[Any] = []
    for number in range(count):
        carry, result = body(carry, number + zero_after((carry, results[-1:])))
        results.append(result)
    return carry, jax.tree.map(lambda *columns: jnp.stack(columns), *results)


def merge_states(states: Any) -> Any:
    """Merge the model states of several parts, [parts, ...]: the mean of floats, the maximum of counters."""
    is_floating = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact)  # noqa: E731
    return jax.tree.map(lambda leaf: leaf.mean(0) if is_floating(leaf) else leaf.max(0), states)


def zero_after(tree: Any) -> jax.Array:
    """Return a 0, int32[], that depends on a tree. XLA computes the tree before operations that use this 0.

    XLA's CPU compiler removes barriers, and orders operations only by the use of their results. Without this 0 it would
    compute all forward passes first and keep the activations of all parts in memory.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size]
    return functools.reduce(jnp.add, [(leaf.ravel()[0] > jnp.inf).astype(jnp.int32) for leaf in leaves], jnp.int32(0))
