"""Compute the same bits on any number of devices: 8 shards of the global batch are summed in a fixed order.

Each device computes an equal number of shards, one after the other. A sum of floating-point numbers depends on the
order of its terms. So the shards' sums are added as a tree of pairs, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), in
which the shards of one device form a branch, for 1, 2, 4 or 8 devices. A sum also depends on the compiler. Its last
bits change if the compiler fuses a product with the following sum, or computes an operation of two shards only once. So
every shard is computed between barriers, by the same operations on any number of devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.flatten_util import ravel_pytree

from jaxddp.core.errors import InputError, Key
from jaxddp.data.batch import Batch
from jaxddp.engine.gradients import Contribution, Gradients, StepLoss, is_float, zero_after
from jaxddp.engine.ways.way import Way, refuse_others
from jaxddp.measure.cost import operations_in
from jaxddp.mesh import AXIS, Topology, stack_over_devices, varying

if TYPE_CHECKING:
    from jaxddp.config import Config

SHARDS = 8

T = TypeVar("T")


class OrderedGradients(Gradients):
    """The gradients of 8 shards, summed in a fixed order."""

    def mean(self, loss: StepLoss, params: Any, model_state: Any, batch: Batch, key: jax.Array) -> Contribution:
        def shard(arrays: tuple[Any, Any], part: Batch, number: jax.Array) -> Contribution:
            return self.share(loss, *arrays, part, jax.random.fold_in(key, number))[0]

        return mean_of_shards(shard, (params, varying(model_state)), batch, for_cpu=self.for_cpu)


@dataclass(frozen=True)
class Reproducible(Way):
    """Replicas that compute the same bits on 1, 2, 4 or 8 devices."""

    @classmethod
    def of(cls, config: "Config", topology: Topology) -> Self:
        key = Key("parallel.reproducible")
        if SHARDS % topology.num_devices:
            problem = f": {SHARDS} shards cannot be divided evenly among {topology.num_devices} devices"
            raise InputError(key, problem, advice=f"use 1, 2, 4 or {SHARDS} devices")
        others: dict[tuple[str, str | None], str] = {
            ("model.batch_norm", "sync"): f"normalizes over devices, but each of the {SHARDS} shards is separate",
        }
        of_sums = "train.gradient_precision", "parallel.buckets", "parallel.shard_optimizer", "train.sync_every"
        others |= {(name, None): "does not apply to a sum in fixed order" for name in of_sums}
        refuse_others(config, key, others)
        return cls(topology, OrderedGradients.of(config, topology))

    @property
    def shares(self) -> int:
        return SHARDS

    def jit_between(self, update: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        on_one = jax.jit(update)  # XLA may round differently in a program of several devices.
        return lambda *values: self.topology.replicate(jax.device_get(on_one(*jax.device_put(jax.device_get(values)))))


def mean_of_shards(compute: Callable[[Any, Batch, jax.Array], T], arrays: Any, batch: Batch, *, for_cpu: bool) -> T:
    """Average the results of `compute` over all shards. Call it inside `jax.shard_map` with a device's slice of a batch

    Args:
        compute: a function of arrays, a shard, and the shard's number in the global batch.
        arrays: all arrays that `compute` uses in addition to the batch, such as the parameters.
        for_cpu: whether XLA's CPU compiler compiles the program, which needs stronger barriers; see `add_barrier`.

    Raises: InputError if `compute` contains a collective.
    """
    count = SHARDS // lax.axis_size(AXIS)
    parts = jax.tree.map(lambda column: column.reshape(count, -1, *column.shape[1:]), batch)
    first, shards, zero = lax.axis_index(AXIS) * count, [], zero_after(arrays)
    compute = _trace(compute, arrays, jax.tree.map(lambda column: column[0], parts), first)
    for number in range(count):
        part = jax.tree.map(lambda column, at=number: column[at], parts)
        shard = add_barrier(compute(*add_barrier((arrays, part), zero, for_cpu), first + number), zero, for_cpu)
        shards.append(shard)
        zero = zero_after(shard)
    means = mean_in_order(jax.tree.map(lambda *columns: jnp.stack(columns), *shards))
    return add_barrier(means, zero_after(means), for_cpu)


def _trace(compute: Callable[..., T], *arguments: Any) -> Callable[..., T]:
    """Trace a function once for all shards. Raises: InputError if the function contains a collective."""
    traced, shapes = jax.make_jaxpr(compute, return_shape=True)(*arguments)
    check_no_collective(traced, Key("parallel.reproducible"), f"each of the {SHARDS} shards is computed separately")
    evaluate = jaxpr_as_fun(traced)
    return lambda *arrays: jax.tree.unflatten(jax.tree.structure(shapes), evaluate(*jax.tree.leaves(arrays)))


def check_no_collective(traced: Any, key: Key, reason: str) -> None:
    """Raise `InputError` for `key`, with a reason, if a traced program communicates between devices."""
    if operation := next(filter(_is_collective, operations_in(traced)), None):
        problem = f": the network or the loss communicates between devices ({operation.primitive.name}), but {reason}"
        raise InputError(key, problem, advice="remove it, for example a batch norm with axis_name")


def _is_collective(operation: Any) -> bool:
    axes = operation.params.get("axes", ()), operation.params.get("axis_name", ())
    return operation.primitive.name != "pvary" and any(names == AXIS or AXIS in names for names in axes)


def add_barrier(tree: T, zero: jax.Array, for_cpu: bool) -> T:
    """Return the arrays behind a barrier. XLA fuses nothing across the barrier, and computes `zero` before the arrays.

    XLA's CPU compiler removes barriers before it fuses operations. So on CPUs the arrays are the carry of a loop, which
    costs a copy. The loop never runs, but XLA cannot derive this, because the condition depends on `zero`.
    """
    if not for_cpu:
        return lax.optimization_barrier((tree, zero))[0]

    def body(carry: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        return carry[0] + 1, jax.tree.map(lambda leaf: leaf - leaf, carry[1])

    return lax.while_loop(lambda carry: carry[0] < zero, body, (zero - zero, tree))[1]


def mean_in_order(shards: T) -> T:
    """Average floating-point leaves over the shards of all devices; take the maximum of all other leaves (counters).

    Args:
        shards: the stacked results of this device's shards; each leaf is [shards of a device, ...].
    """
    leaves, structure = jax.tree.flatten(shards)
    floats = list(filter(is_float, leaves))
    _, unravel = ravel_pytree([leaf[0] for leaf in floats])
    rows = jax.vmap(lambda row: ravel_pytree(row)[0])(floats)
    total = _sum_over_devices(_tree_sum(rows))
    # The sign of a sum of zeros depends on the number of zeros, so every zero is made positive.
    means = iter(unravel(jnp.where(total == 0, 0, total / SHARDS)))
    return structure.unflatten(next(means) if is_float(leaf) else lax.pmax(leaf.max(0), AXIS) for leaf in leaves)


def _tree_sum(rows: jax.Array) -> jax.Array:
    """Sum the n rows of an array [n, ...] as a tree of neighbouring pairs; n is a power of two."""
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def _sum_over_devices(branch: jax.Array) -> jax.Array:
    """Sum the branches of all devices, [P] each. Each device sums a slice of the elements; the slices are gathered."""
    devices = lax.axis_size(AXIS)
    if devices == 1:
        return lax.psum(branch, AXIS)
    padded = jnp.pad(branch, (0, -len(branch) % devices))
    part = _tree_sum(lax.all_to_all(padded.reshape(devices, -1), AXIS, 0, 0))
    return stack_over_devices(part).ravel()[: len(branch)]
