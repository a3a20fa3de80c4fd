"""Whether all devices still hold the same state: a checksum of the bytes that each one really has.

The step keeps replicas alike by computing the same on each. Nothing in it would notice a bit that a device's memory
flipped, or a device that computes wrongly: its replica goes its own way from there, and so does every gradient.

Every 32-bit word of the state is combined with its place, scrambled, and added up, wrapping around. Combining and
scrambling are one-to-one, so a change within one word, such as a flipped bit, always changes the sum. The place
decides what a word becomes, so a swap changes it too; that, or a change of many words, is missed once in 2^32 times.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxddp.core.errors import ReplicaError
from jaxddp.core.wording import counted
from jaxddp.engine.buckets import stacked_over_devices
from jaxddp.engine.state import SMALL_LEAF
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.variables import path_of

_NAMED = 4
"""How many devices a line names."""


class Replicas:
    """Compares the replicas of a state on the devices of a mesh, of which there are two or more.

    The programs are compiled on first use, and shared by all that compare states of the same shapes.
    """

    def __init__(self, topology: Topology):
        self.topology = topology

    def check(self, step: int, state: Any) -> None:
        """Wait for the state of a step, and see that all devices hold the same bits.

        All processes must call it alike, and all of them raise or none does.

        Raises:
            ReplicaError: names the devices that differ from the majority, and the first array that does.
        """
        totals = checksums(self.topology)(state)
        found = np.asarray(totals.addressable_data(0))
        if (found == found[0]).all():
            return
        by_array = np.asarray(array_checksums(self.topology)(state).addressable_data(0))
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
        differing = np.flatnonzero((by_array != by_array[:1]).any(axis=0))
        names = [path_of(paths[place]) for place in differing]
        raise ReplicaError(
            f"step {step}: the devices no longer hold the same state: {_who(found.tolist(), self.topology)}, "
            f"{_where(names, len(paths))}. Nothing of it is saved: start the same command again, which goes on from "
            "the last checkpoint; where one device differs again, take it out"
        )


@functools.cache
def checksums(topology: Topology) -> Callable[[Any], jax.Array]:
    """Compile (on first use) the checksum of a replicated state as each device holds it, in mesh order: uint32[N].

    The state is read once, and what lies in small arrays twice. Every device gets all of the checksums.
    """

    def checksum(state: Any) -> jax.Array:
        words = [_words(leaf) for leaf in jax.tree.leaves(state)]
        small = [each for each in words if each.size < SMALL_LEAF]
        large = [each for each in words if each.size >= SMALL_LEAF]
        together = [jnp.concatenate(small)] if small else []
        return _sum(jnp.stack([_sum(each) for each in [*together, *large]]))

    return _on_each(checksum, topology)


@functools.cache
def array_checksums(topology: Topology) -> Callable[[Any], jax.Array]:
    """The same for each array of the state by itself: uint32[N, arrays]. It takes seconds to compile."""
    return _on_each(lambda state: jnp.stack([_sum(_words(leaf)) for leaf in jax.tree.leaves(state)]), topology)


def _on_each(checksum: Callable[[Any], jax.Array], topology: Topology) -> Callable[[Any], jax.Array]:
    def local(state: Any) -> jax.Array:
        # What is known to be the same everywhere might be computed once.
        return stacked_over_devices(checksum(lax.pcast(state, AXIS, to="varying")))

    return jax.jit(jax.shard_map(local, mesh=topology.mesh, in_specs=P(), out_specs=P()))


def _words(leaf: jax.Array) -> jax.Array:
    """The bits of an array as uint32[words]; an element of fewer bits is a word by itself."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype.itemsize == 1 and not jnp.issubdtype(leaf.dtype, jnp.floating):
        # Of a bool, or of integers of four bits, there is no other way to the bits.
        leaf = leaf.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(leaf, unsigned).reshape(-1).astype(jnp.uint32)


def _sum(words: jax.Array) -> jax.Array:
    """uint32[] of uint32[words]."""
    # An odd factor is one-to-one, so that each place has a number of its own; this one is 2^32 by the golden ratio.
    places = lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B9)
    return _scrambled(words ^ places).sum(dtype=jnp.uint32)


def _scrambled(words: jax.Array) -> jax.Array:
    """One-to-one, and every bit depends on every other: the last part of MurmurHash3 (Appleby 2011)."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def _who(totals: Sequence[int], topology: Topology) -> str:
    """Which devices differ from which."""
    (most, count), *_ = Counter(totals).most_common()
    devices = [f"device {device} of process {device.process_index}" for device in topology.mesh.devices.flat]
    if 2 * count > len(totals):
        others = [device for device, total in zip(devices, totals, strict=True) if total != most]
        return f"{_list(others)} {'differs' if len(others) == 1 else 'differ'} from the other {count}"
    groups = [[device for device, own in zip(devices, totals, strict=True) if own == total] for total in _once(totals)]
    return f"there is no majority ({' against '.join(map(_list, groups))})"


def _once(totals: Sequence[int]) -> Iterator[int]:
    return iter(dict.fromkeys(totals))


def _list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _where(names: Sequence[str], count: int) -> str:
    if not names:
        # The next program may have been given other bits, or the first one have computed wrongly.
        return "though not where its arrays were compared one by one, so that a device computes wrongly"
    return f"in {len(names)} of {counted(count, 'array')}, first in {names[0]}"
