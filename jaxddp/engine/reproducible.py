"""The same bits on any number of devices: 8 shards of the global batch, each computed by itself, summed in one order.

Each device computes as many shards as fall on it. Sums of floating-point numbers depend on their order, so the shards'
sums are added as a tree of pairs, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), in which the shards of a device are a
branch, whether there are 1, 2, 4 or 8. They depend on the compiler, too: where it joins a product with the sum that
follows, or computes once what two shards have in common, the last bits differ. So every shard is one program between
walls that the compiler does not see through, and the program is the same on any number of devices.
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
    """The mean of what `take` makes of all shards: to be called inside `jax.shard_map` on a device's slice of a batch.

    Args:
        take: a function of arrays, a shard, and its number in the global batch.
        arrays: all those that are in use beside the batch; the parameters for one.
        for_cpu: for XLA's CPU compiler, which takes higher walls; see `walled`.

    Raises:
        InputError: `take` asks other devices.
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
    """The same function, traced once for all shards. Raises: InputError; it has a collective."""
    traced, shapes = jax.make_jaxpr(take, return_shape=True)(*like)
    if not _sees_collectives():
        lost = "parallel.reproducible cannot tell whether the network asks other devices, and would take it"
        private_names.say_lost("jax", "jaxpr (axes of a collective)", lost)
    for operation in operations_in(traced):
        if _is_collective(operation):
            raise InputError(
                Key("parallel.reproducible"),
                f": the network or the loss asks other devices ({operation.primitive.name}), and "
                f"each of {SHARDS} shards is computed by itself",
                advice="take it out, such as a batch norm with axis_name",
            )
    evaluate = jaxpr_as_fun(traced)
    return lambda *arrays: jax.tree.unflatten(jax.tree.structure(shapes), evaluate(*jax.tree.leaves(arrays)))


def _is_collective(operation: Any) -> bool:
    axes = operation.params.get("axes", ()), operation.params.get("axis_name", ())
    return operation.primitive.name != "pvary" and any(names == AXIS or AXIS in names for names in axes)


@functools.cache
def _sees_collectives() -> bool:
    """Whether a plain sum over the devices is known for one: JAX promises the names of no operation's parameters."""
    traced = jax.make_jaxpr(lambda x: lax.psum(x, AXIS), axis_env=[(AXIS, 1)])(jnp.float32(0))
    return any(map(_is_collective, operations_in(traced)))


def walled(tree: T, zero: jax.Array, for_cpu: bool) -> T:
    """The same arrays, of which XLA computes nothing together with what comes before or after; and `zero` before them.

    It is a barrier, which XLA's CPU compiler drops before it decides what to compute together. For that one the arrays
    pass through a loop that never turns, as it cannot know of a `zero` that is computed; they are copied for it.
    """
    if not for_cpu:
        return lax.optimization_barrier((tree, zero))[0]

    def turns(carry: tuple[jax.Array, T]) -> jax.Array:
        return carry[0] < zero

    def turn(carry: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        return carry[0] + 1, jax.tree.map(lambda leaf: leaf - leaf, carry[1])

    return lax.while_loop(turns, turn, (zero - zero, tree))[1]


def mean_in_order(shards: T) -> T:
    """The means of all floating-point leaves over the shards of all devices; of others (counters) the maximum.

    Args:
        shards: a tree of the results of this device's shards, [shards of a device, ...] each.
    """
    leaves, structure = jax.tree.flatten(shards)
    floating = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    chosen = [leaf for leaf, is_float in zip(leaves, floating, strict=True) if is_float]
    _, unravel = ravel_pytree([leaf[0] for leaf in chosen])
    rows = jax.vmap(lambda row: ravel_pytree(row)[0])(chosen)
    total = _over_devices(_tree_sum(rows))
    # The sum of two zeros has a sign that depends on how many were added; a comparison takes no notice of it.
    means = iter(unravel(jnp.where(total == 0, 0, total / SHARDS)))
    found = [
        next(means) if is_float else lax.pmax(leaf.max(0), AXIS)
        for leaf, is_float in zip(leaves, floating, strict=True)
    ]
    return jax.tree.unflatten(structure, found)


def _tree_sum(rows: jax.Array) -> jax.Array:
    """Of a power of two of rows [n, ...], neighbours first."""
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def _over_devices(branch: jax.Array) -> jax.Array:
    """The tree's sum of a branch [P] from each device: each device sums a part, and all parts are put together."""
    devices = lax.axis_size(AXIS)
    if devices == 1:
        return lax.psum(branch, AXIS)
    size = -(-len(branch) // devices)
    padded = jnp.pad(branch, (0, devices * size - len(branch)))
    part = _tree_sum(lax.all_to_all(padded.reshape(devices, size), AXIS, 0, 0))
    return stacked_over_devices(part).ravel()[: len(branch)]
