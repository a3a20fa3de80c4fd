"""Checks the sums of an all-reduce, which a training step uses, and measures its speed."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxddp.core.errors import InputError
from jaxddp.mesh import AXIS, Topology

REPEATS = 9
_CYCLE = 5


def make_all_reduce(topology: Topology) -> Callable[[jax.Array], jax.Array]:
    """Return a function that sums over all devices: float32[devices * n], sharded, to float32[n], replicated."""
    reduce = jax.shard_map(lambda part: lax.psum(part, AXIS), mesh=topology.mesh, in_specs=P(AXIS), out_specs=P())
    return jax.jit(reduce)


def contributions(topology: Topology, size: int) -> jax.Array:
    """Return float32[devices * size]. Element j on device i is (i + j) mod 5, so sums are exact in any order."""

    def part() -> jax.Array:
        return (lax.axis_index(AXIS) + jnp.arange(size)).astype(jnp.float32) % _CYCLE

    return jax.jit(jax.shard_map(part, mesh=topology.mesh, in_specs=(), out_specs=P(AXIS)))()


def check_sum(topology: Topology, total: jax.Array) -> None:
    """Compare the sum of `contributions` on each device of this process with the expected sum.

    Raises:
        InputError: a sum is wrong.
    """
    cycle = [sum((i + j) % _CYCLE for i in range(topology.num_devices)) for j in range(_CYCLE)]
    expected = np.resize(np.array(cycle, np.float32), total.shape)
    for shard in total.addressable_shards:
        actual = np.asarray(shard.data)
        wrong = np.flatnonzero(actual != expected)
        if wrong.size:
            at = wrong[0]
            raise InputError(
                f"{shard.device}: a sum of {total.nbytes} bytes over {topology.num_devices} devices is wrong: element "
                f"{at} is {actual[at]:g}, expected {expected[at]:g}; do not train here before this is fixed"
            )


def time_all_reduce(topology: Topology, num_bytes: int, repeats: int = REPEATS) -> tuple[float, jax.Array]:
    """Return the median seconds of an all-reduce of `num_bytes` on each device, and the last sum, for `check_sum`.

    All processes must call this function with the same arguments. It does not check the sum: if one process raised an
    error between the all-reduces, the others would wait for it.
    """
    reduce, parts = make_all_reduce(topology), contributions(topology, num_bytes // 4)
    total, seconds = jax.block_until_ready(reduce(parts)), []
    for _ in range(repeats):
        begin = time.perf_counter()
        total = jax.block_until_ready(reduce(parts))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), total


def bus_bandwidth(num_devices: int, num_bytes: int, seconds: float) -> float:
    """Return the bytes per second over each link of a ring. A link carries 2 (n - 1) / n times the buffer.

    See Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002. nccl-tests calls it busbw.
    """
    return 2 * (num_devices - 1) / num_devices * num_bytes / seconds
