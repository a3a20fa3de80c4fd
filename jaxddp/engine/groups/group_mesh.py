"""Groups of devices, each of which trains its own parameters between two averages.

The devices of a group average their gradients in each step. Different groups average their parameters only after many
steps; see `jaxddp.engine.groups.outer_step`. The state of a run stacks the states of its groups along a first axis of
every array, which is divided among the groups. Only the step's number and the arrays of the outer optimizer are the
same in all groups, and they are not stacked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxddp.config import Config
from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import counted
from jaxddp.engine.groups.outer_optimizer import OuterOptimizer
from jaxddp.engine.state import DEVICE_GROUPS, TrainState
from jaxddp.mesh import AXIS, GROUP, Topology


@dataclass(frozen=True)
class GroupMesh:
    """The groups of a run's devices.

    Attributes:
        topology: the devices of the run. Each group has equally many of them, which are neighbours in its order.
        count: the number of groups, at least 2.
        outer: the optimizer that combines the parameters of the groups.
    """

    topology: Topology
    count: int
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)

    @classmethod
    def of(cls, config: Config, topology: Topology) -> "GroupMesh | None":
        """Return the groups of a config, by default one for each process; None if devices average every gradient.

        Raises:
            InputError: the number of groups does not fit the devices, or another key conflicts with groups.
        """
        every, count = config.train.sync_every, config.parallel.groups
        if every is None:
            return None
        subject = Key("train.sync_every", every, f'"{every}"')
        if count is None and topology.process_count == 1:
            advice = ("give ", Key("parallel.groups"), ", or leave it out")
            raise InputError(subject, ": a single process is a single group of devices", advice=advice)
        count = topology.process_count if count is None else count
        if topology.num_devices % count:
            fitting = [each for each in range(2, topology.num_devices + 1) if topology.num_devices % each == 0]
            advice = f"{', '.join(map(str, fitting))} would do" if fitting else "use more devices"
            devices = counted(topology.num_devices, "device")
            raise InputError(Key("parallel.groups", count), f" does not divide {devices}", advice=advice)
        if config.parallel.shard_optimizer:
            conflict = ": each group keeps its whole state on each of its devices"
            raise InputError(Key("parallel.shard_optimizer", True), conflict, advice=("leave out it or ", subject))
        return cls(topology, count, OuterOptimizer.of(config))

    @cached_property
    def mesh(self) -> Mesh:
        """The devices of the run in the same order, with an axis for the groups and one within a group."""
        devices = self.topology.mesh.devices.reshape(self.count, -1)
        return Mesh(devices, (GROUP, AXIS), axis_types=(AxisType.Auto, AxisType.Auto))

    @property
    def size(self) -> int:
        """The number of devices in a group."""
        return self.topology.num_devices // self.count

    @cached_property
    def first(self) -> Topology:
        """The devices of the first group."""
        return Topology(Mesh(self.mesh.devices[0], (AXIS,), axis_types=(AxisType.Auto,)), self.topology.peers)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds."""
        return NamedSharding(self.mesh, P())

    @property
    def stacked(self) -> NamedSharding:
        """The sharding of an array whose first axis is divided among the groups."""
        return NamedSharding(self.mesh, P(GROUP))

    def specs(self, state: TrainState) -> TrainState:
        """Return the `PartitionSpec` of each part of a stacked state, a prefix of its tree."""
        parts = {name: P() if name == DEVICE_GROUPS else P(GROUP) for name in state.parts}
        fields: dict[str, Any] = dict.fromkeys(("params", "model_state", "opt_state"), P(GROUP))
        return state.replace(step=P(), parts=parts, **fields)

    def shardings(self, state: TrainState) -> TrainState:
        """Return the sharding of each part of a stacked state, a prefix of its tree."""
        is_spec = lambda leaf: isinstance(leaf, P)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(state), is_leaf=is_spec)

    def stack(self, arrays: Any) -> Any:
        """Return arrays repeated for each group, [groups, …]. Call it inside `jax.jit`."""
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.count, *leaf.shape)), arrays)

    def one_step(self, one_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a group's step of `make_local_step` with results that vary over the groups, as its arguments do."""

        def vary(leaf: jax.Array) -> jax.Array:
            varies = GROUP in jax.typeof(leaf).manual_axis_type.varying
            return leaf if varies else lax.pcast(leaf, GROUP, to="varying")

        def step(state: TrainState, *arguments: Any) -> tuple[TrainState, Any]:
            after, sums = one_step(state, *arguments)
            # The guard selects the step's number, too, by a condition of the group, but the number does not depend on
            # it.
            return jax.tree.map(vary, after).replace(step=state.step + 1), jax.tree.map(vary, sums)

        return step

    def on_devices(self, one_step: Callable[..., Any], feed: tuple[P, ...]) -> Callable[..., Any]:
        """Return a function of a stacked state, a feed and a key that runs a step of `one_step` on all devices.

        It returns the next stacked state, and the sums of each group, [groups, …].

        Args:
            feed: the shardings of the feed on a mesh whose only axis is "data".
        """
        feed_specs = [P((GROUP, AXIS)) if spec == P(AXIS) else spec for spec in feed]

        def local(state: TrainState, *arguments: Any) -> tuple[TrainState, Any]:
            own = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[1:]), state.replace(step=()))
            after, sums = one_step(own.replace(step=state.step), *arguments)
            step, after, sums = after.step, *jax.tree.map(lambda leaf: leaf[None], (after.replace(step=()), sums))
            return after.replace(step=step), sums

        def run(state: TrainState, *arguments: Any) -> tuple[TrainState, Any]:
            shared, own = state.parts[DEVICE_GROUPS], without_outer_state(state)
            specs = self.specs(own)
            in_specs = (specs, *feed_specs, P())
            mapped = jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=(specs, P(GROUP)))
            after, sums = mapped(own, *arguments)
            return after.replace(parts={**after.parts, DEVICE_GROUPS: shared}), sums

        return run

    def fetch(self, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
        """Return arrays [groups, …] of one dtype on the host. All processes call it together.

        The arrays are exchanged in one message, so the groups wait for each other only once.
        """
        if self.topology.process_count == 1:
            return jax.device_get(list(arrays))
        rows = np.concatenate([_rows_here(array) for array in arrays], axis=1)
        # Few lengths mean few programs to compile.
        length = 1 << (rows.shape[1] - 1).bit_length()
        padded = np.pad(rows, ((0, 0), (0, length - rows.shape[1])))
        placed = jax.make_array_from_process_local_data(self.stacked, padded, (self.count, length))
        whole = np.asarray(self._gather(placed))
        ends = np.cumsum([array.size // self.count for array in arrays])
        return [part.reshape(array.shape) for part, array in zip(np.split(whole, ends, axis=1), arrays, strict=False)]

    @cached_property
    def _gather(self) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(lambda rows: rows, out_shardings=self.replicated)

    def connect(self) -> None:
        """Run a first collective between the groups and one within each; see `Topology.connect`."""
        if self.topology.process_count > 1:
            for axis in (GROUP, AXIS):
                total = jax.shard_map(
                    lambda ones, axis=axis: lax.psum(ones, axis),
                    mesh=self.mesh,
                    in_specs=P((GROUP, AXIS)),
                    out_specs=P(AXIS if axis == GROUP else GROUP),
                )
                ones = self.topology.place(np.ones(len(self.topology.mesh.local_devices), np.float32))
                jax.block_until_ready(jax.jit(total)(ones))


def _rows_here(array: jax.Array) -> np.ndarray:
    """Return the rows of this process's groups, [groups here, values], of an array [groups, …]."""
    rows = {shard.index[0].start or 0: np.asarray(shard.data).reshape(1, -1) for shard in array.addressable_shards}
    return np.concatenate([rows[number] for number in sorted(rows)])


def unstacked_shapes(state: TrainState) -> TrainState:
    """Return the shapes of one group's state, for a stacked state. Other states are returned as they are."""
    if state.groups is None:
        return state
    own = without_outer_state(state).replace(step=())
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), own)
    return shapes.replace(step=jax.ShapeDtypeStruct((), jnp.int32))


def without_outer_state(state: TrainState) -> TrainState:
    """Return a stacked state without the arrays that the groups share."""
    return state.replace(parts={name: arrays for name, arrays in state.parts.items() if name != DEVICE_GROUPS})
