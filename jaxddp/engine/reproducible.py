"""Compute the same bits on any number of devices: 8 shards of the global batch are summed in a fixed order.

Each device computes its share of the shards, one after the other. Sums of floating-point numbers depend on their
order. So the shards' sums are added as a tree of pairs, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), in which the shards
of one device form a branch, for 1, 2, 4 or 8 devices. Sums also depend on the compiler. Their last bits change if the
compiler fuses a product with the following sum, or computes a common part of two shards only once. So every shard is
one program between barriers, and that program is the same on any number of devices.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.flatten_util import ravel_pytree

import jaxddp.core.private_names as private_names
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.data.batch import Batch
from jaxddp.engine.buckets import stacked_over_devices
from jaxddp.engine.microbatches import zero_after
from jaxddp.measure.flops import operations_in
from jaxddp.mesh import AXIS

SHARDS = 8

T = TypeVar("T")


def mean_of_shards(
    take: Callable[[Any, Batch, jax.Array], T], arrays: Any, batch: Batch, *, for_cpu: bool = False
) -> T:
    """Average the results of `take` over all shards. Call it inside `jax.shard_map` with a device's slice of a batch.

    Args:
        take: a function of arrays, a shard, and the shard's number in the global batch.
        arrays: all arrays that `take` uses beside the batch, such as the parameters.
        for_cpu: whether XLA's CPU compiler compiles the program, which needs stronger barriers; see `walled`.

    Raises:
        InputError: `take` contains a collective.
    """
    count = SHARDS // lax.axis_size(AXIS)
    parts = jax.tree.map(lambda column: column.reshape(count, -1, *column.shape[1:]), batch)
    first, shards, zero = lax.axis_index(AXIS) * count, [], zero_after(arrays)
    take = _traced(take, arrays, jax.tree.map(lambda column: column[0], parts), first)
    for number in range(count):
        part = jax.tree.map(lambda column, at=number: column[at], parts)
        shard = walled(take(*walled((arrays, part), zero, for_cpu), first + number), zero, for_cpu)
        shards.append(shard)
        zero = zero_after(shard)
    means = mean_in_order(jax.tree.map(lambda *columns: jnp.stack(columns), *shards))
    return walled(means, zero_after(means), for_cpu)


def _traced(take: Callable[..., T], *like: Any) -> Callable[..., T]:
    """Trace a function once for all shards. Raises: InputError if the function contains a collective."""
    traced, shapes = jax.make_jaxpr(take, return_shape=True)(*like)
    if not _sees_collectives():
        lost = "parallel.reproducible cannot detect, and so accepts, a network that communicates between devices"
        private_names.warn_missing("jax", "jaxpr (axes of a collective)", lost)
    for operation in operations_in(traced):
        if _is_collective(operation):
            raise InputError(
                Key("parallel.reproducible"),
                f": the network or the loss communicates between devices ({operation.primitive.name}), but "
                f"each of the {SHARDS} shards is computed separately",
                advice="remove it, for example a batch norm with axis_name",
            )
    evaluate = jaxpr_as_fun(traced)
    return lambda *arrays: jax.tree.unflatten(jax.tree.structure(shapes), evaluate(*jax.tree.leaves(arrays)))


def _is_collective(operation: Any) -> bool:
    axes = operation.params.get("axes", ()), operation.params.get("axis_name", ())
    return operation.primitive.name != "pvary" and any(names == AXIS or AXIS in names for names in axes)


@functools.cache
def _sees_collectives() -> bool:
    """Tell whether `_is_collective` recognizes a sum over devices. JAX may rename operations' parameters."""
    traced = jax.make_jaxpr(lambda x: lax.psum(x, AXIS), axis_env=[(AXIS, 1)])(jnp.float32(0))
    return any(map(_is_collective, operations_in(traced)))


def walled(tree: T, zero: jax.Array, for_cpu: bool) -> T:
    """Return the arrays behind a barrier: XLA fuses nothing across it, and computes `zero` before the arrays.

    XLA's CPU compiler removes barriers before it fuses operations. So on CPUs the arrays pass through a loop, which
    costs a copy. The loop never runs, but XLA cannot know this, because the condition depends on `zero`.
    """
    if not for_cpu:
        return lax.optimization_barrier((tree, zero))[0]

    def turns(carry: tuple[jax.Array, T]) -> jax.Array:
        return carry[0] < zero

    def turn(carry: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        return carry[0] + 1, jax.tree.map(lambda leaf: leaf - leaf, carry[1])

    return lax.while_loop(turns, turn, (zero - zero, tree))[1]


def mean_in_order(shards: T) -> T:
    """Average all floating-point leaves over the shards of all devices; take the maximum of the others (counters).

    Args:
        shards: the stacked results of this device's shards; each leaf is [shards of a device, ...].
    """
    leaves, structure = jax.tree.flatten(shards)
    floating = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    chosen = [leaf for leaf, is_float in zip(leaves, floating, strict=True) if is_float]
    _, unravel = ravel_pytree([leaf[0] for leaf in chosen])
    rows = jax.vmap(lambda row: ravel_pytree(row)[0])(chosen)
    total = _over_devices(_tree_sum(rows))
    # The sign of a sum of zeros depends on how many were added, so every zero becomes positive.
    means = iter(unravel(jnp.where(total == 0, 0, total / SHARDS)))
    merged = [
        next(means) if is_float else lax.pmax(leaf.max(0), AXIS)
        for leaf, is_float in zip(leaves, floating, strict=True)
    ]
    return jax.tree.unflatten(structure, merged)


def _tree_sum(rows: jax.Array) -> jax.Array:
    """Sum the n rows of an array [n, ...] as a tree of neighbouring pairs; n is a power of two."""
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def _over_devices(branch: jax.Array) -> jax.Array:
    """Sum the devices' branches, [P] each: every device sums a part of the elements, and the parts are gathered."""
    devices = lax.axis_size(AXIS)
    if devices == 1:
        return lax.psum(branch, AXIS)
    size = -(-len(branch) // devices)
    padded = jnp.pad(branch, (0, devices * size - len(branch)))
    part = _tree_sum(lax.all_to_all(padded.reshape(devices, size), AXIS, 0, 0))
    return stacked_over_devices(part).ravel()[: len(branch)]
