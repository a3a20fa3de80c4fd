"""Check that all devices hold the same state.

Replicas stay equal because every device computes the same update. The step itself does not detect a flipped bit in a
device's memory or a device that computes wrong results. After such a fault the replica of that device, and every
averaged gradient, is wrong.

Every 32-bit word of the state is combined with its index, hashed, and summed modulo 2^32. Combining and hashing are
one-to-one, so a change within one word, such as a flipped bit, always changes the sum. A change of several words, such
as a swap of two words, is missed with a probability of 2^-32.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.sharding import Mesh

from jaxddp.core.errors import ReplicaError, counted, listed
from jaxddp.engine.state import TrainState, few_arrays
from jaxddp.engine.ways.way import Way
from jaxddp.kernels import path_of
from jaxddp.mesh import AXIS, Device, stack_over_devices

_REPLICATED = P()
_MOST_NAMES = 4
"""The largest number of devices that an error message lists."""


@dataclass(frozen=True)
class Replicas:
    """Compares the replicas of a state on the devices of a way with two or more devices.

    Programs are compiled on first use and shared by all instances that compare states of the same shapes.
    """

    way: Way

    def check(self, step: int, state: TrainState) -> None:
        """Wait for the state of a step, and check that all devices that hold an array hold the same bits.

        All processes must call it together.

        Raises:
            ReplicaError: on all processes, if the state of a device differs. The message names the devices that differ
                from the majority, and the first array that differs.
        """
        for arrays, mesh, spec, devices in self.way.copies(state):
            rows = [[*mesh.devices.flat].index(device) for device in devices]
            totals = np.asarray(checksums(mesh, spec)(arrays).addressable_data(0))[rows]
            if (totals == totals[0]).all():
                continue
            by_array = np.asarray(checksums(mesh, spec, of_each=True)(arrays).addressable_data(0))[rows]
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(arrays)]
            names = [path_of(paths[index]) for index in np.flatnonzero((by_array != by_array[:1]).any(axis=0))]
            raise ReplicaError(
                f"step {step}: the devices no longer hold the same state: {_devices(totals.tolist(), devices)}, "
                f"{_arrays(names, len(paths))}. This state is not saved: run the same command again to continue from "
                "the last checkpoint; if the same device differs again, remove it from the job"
            )


@functools.cache
def checksums(mesh: Mesh, spec: P = _REPLICATED, *, of_each: bool = False) -> Callable[[Any], jax.Array]:
    """Compile (on first use) the checksum of the state on each device, uint32[N] in mesh order, replicated.

    The program reads large arrays once and small arrays twice.

    Args:
        spec: the sharding of the arrays, whose shards are compared.
        of_each: return the checksum of each array, uint32[N, arrays]. This program takes seconds to compile.
    """

    def local(state: Any) -> jax.Array:
        # The cast marks the values as different on each device. Otherwise XLA might compute one checksum for all
        # devices.
        words = [_words(leaf) for leaf in jax.tree.leaves(lax.pcast(state, AXIS, to="varying"))]
        sums = jnp.stack([_sum(array) for array in (words if of_each else few_arrays(words))])
        return stack_over_devices(sums if of_each else _sum(sums))

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P()))


def _words(leaf: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32[words]. An element of fewer than 32 bits becomes one word."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype.itemsize == 1 and not jnp.issubdtype(leaf.dtype, jnp.floating):
        # A bool or a 4-bit integer cannot be bitcast.
        leaf = leaf.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(leaf, unsigned).reshape(-1).astype(jnp.uint32)


def _sum(words: jax.Array) -> jax.Array:
    """Return the checksum of uint32[words]: uint32[]."""
    # Multiplication by an odd factor is one-to-one modulo 2^32, so every index gives another number. The factor is 2^32
    # divided by the golden ratio.
    indices = lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B9)
    return _hash(words ^ indices).sum(dtype=jnp.uint32)


def _hash(words: jax.Array) -> jax.Array:
    """Hash each word one-to-one, with the finalizer of MurmurHash3 (Appleby 2011)."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def _devices(totals: Sequence[int], compared: Sequence[Device]) -> str:
    """Return a list of the devices that differ from the majority, or all parties if there is no majority."""
    (most, count), *_ = Counter(totals).most_common()
    devices = [f"device {device} of process {device.process_index}" for device in compared]
    if 2 * count > len(totals):
        others = [device for device, total in zip(devices, totals, strict=True) if total != most]
        names = listed(others, most=_MOST_NAMES)
        return f"{names} {'differs' if len(others) == 1 else 'differ'} from the other {count}"
    parties: dict[int, list[str]] = {}
    for device, total in zip(devices, totals, strict=True):
        parties.setdefault(total, []).append(device)
    return f"there is no majority ({' against '.join(listed(each, most=_MOST_NAMES) for each in parties.values())})"


def _arrays(names: Sequence[str], count: int) -> str:
    """Return the number and the first name of the arrays that differ."""
    if not names:
        # A device computed one of the two checksums wrongly, or its memory changed between the two programs.
        return "but a comparison of each array found no difference, so a device computes wrongly"
    return f"in {len(names)} of {counted(count, 'array')}, first in {names[0]}"
