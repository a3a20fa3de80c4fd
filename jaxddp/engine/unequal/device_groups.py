"""Groups of a process's devices that run a program of their own, on their shards of arrays of the whole mesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxddp.mesh import AXIS, Device, Topology


@dataclass(frozen=True)
class DeviceGroup:
    """The devices of this process whose slices have the same size.

    Attributes:
        size: the number of examples of each slice.
        mesh: a mesh of these devices alone.
        places: the places of these devices among the devices of this process.
        numbers: int32[devices], the place of each device in the mesh of all devices, on that device.
    """

    size: int
    mesh: Mesh
    places: tuple[int, ...]
    numbers: jax.Array

    @classmethod
    def of(cls, size: int, devices: dict[int, Device], first: int) -> "DeviceGroup":
        """Create the group of some devices, by their places in the mesh of all devices.

        Args:
            first: the place of the first device of this process.
        """
        mesh = Mesh(np.array(list(devices.values())), (AXIS,), axis_types=(AxisType.Auto,))
        numbers = jax.device_put(np.array(list(devices), np.int32), NamedSharding(mesh, P(AXIS)))
        return cls(size, mesh, tuple(place - first for place in devices), numbers)

    def shards(self, tree: Any) -> Any:
        """Return arrays on the devices of the group that share the memory of their shards of the arrays of a tree.

        An array is either replicated or divided along its first axis.
        """

        def local(leaf: jax.Array) -> jax.Array:
            shards = device_arrays(leaf)
            own = [shards[place] for place in self.places]
            return jax.make_array_from_single_device_arrays(self._shape(leaf), self._sharding(leaf), own)

        return jax.tree.map(local, tree)

    def shapes(self, tree: Any) -> Any:
        """Return the shapes of `shards`. The tree may consist of arrays or of shapes with shardings."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(self._shape(leaf), leaf.dtype, sharding=self._sharding(leaf)), tree
        )

    def specs(self, tree: Any) -> Any:
        """Return the `PartitionSpec` of each array of `shards`, or of its shape in `shapes`.

        The spec decides whether a value varies over the devices. In a group of one device, the sharding itself does not
        tell, because a divided array is also whole on that device.
        """
        return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)

    def _sharding(self, leaf: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P() if leaf.sharding.is_fully_replicated else P(AXIS))

    def _shape(self, leaf: Any) -> tuple[int, ...]:
        if leaf.sharding.is_fully_replicated:
            return leaf.shape
        return len(self.places) * (leaf.shape[0] // len(leaf.sharding.device_set)), *leaf.shape[1:]


def groups_of(topology: Topology, sizes: Sequence[int]) -> list[DeviceGroup]:
    """Return the groups of this process's devices, given the size of each device's slice in mesh order."""
    own = set(topology.mesh.local_devices)
    devices = {place: device for place, device in enumerate(topology.mesh.devices.flat) if device in own}
    first = min(devices)
    return [
        DeviceGroup.of(size, {place: device for place, device in devices.items() if sizes[place] == size}, first)
        for size in sorted({sizes[place] for place in devices}, reverse=True)
    ]


def join_groups(results: Sequence[Any], topology: Topology) -> Any:
    """Return arrays of the whole mesh, [devices, ...], from arrays of the groups, [devices of the group, ...].

    Args:
        results: the tree of each group's arrays, divided along their first axis.
    """

    def joined(*leaves: jax.Array) -> jax.Array:
        # JAX finds the place of each shard by its device.
        shards = [shard for leaf in leaves for shard in device_arrays(leaf)]
        shape = topology.num_devices, *leaves[0].shape[1:]
        return jax.make_array_from_single_device_arrays(shape, topology.sharded, shards)

    return jax.tree.map(joined, *results)


def device_arrays(array: jax.Array) -> list[jax.Array]:
    """Return the array of each device of this process, in mesh order, without a copy."""
    # The shards of a single device are available in half the time.
    if len(array.sharding.addressable_devices) == 1:
        return [array.addressable_data(0)]
    return [shard.data for shard in array.addressable_shards]
