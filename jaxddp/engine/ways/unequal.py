"""Slices of a batch that differ in size, for devices that differ in speed.

In a program that all devices share, every slice has the same shape, so a small slice would be padded to the size of the
largest, and take as long. Therefore such a step has two programs. In the first, each device computes the gradient of
its own slice, without communication; the devices of a process whose slices have the same size share this program. In
the second, which all devices share, the gradients are averaged and the state is updated. The slots of a batch have the
size of the largest slice, but nothing is computed for their padding.

The gradient of a slice is a sum over examples, and the average is divided by the average number of examples. So the
mean is exact for any sizes. Model states, such as batch statistics, are averaged with the sizes as weights.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxddp.core.errors import InputError, Key
from jaxddp.data.batch import Batch
from jaxddp.data.batch_plan import Division
from jaxddp.engine.gradients import Contribution, Gradients
from jaxddp.engine.objective import MetricSums
from jaxddp.engine.programs import Program, TrainStep, gather_batch, shapes_of
from jaxddp.engine.state import TrainState, all_finite
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.reproducible import find_collective
from jaxddp.engine.ways.way import Way
from jaxddp.measure.cost import Cost, compile_with_cost
from jaxddp.mesh import AXIS, Device, Topology, varying

if TYPE_CHECKING:
    from jaxddp.config import Config


@dataclass(frozen=True)
class Unequal(Way):
    """Replicas whose slices of a batch differ in size.

    Attributes:
        counts: the number of examples of each device's slice, in mesh order.
    """

    counts: tuple[int, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    has_loop = False  # Two programs cannot be the body of a loop.

    @classmethod
    def of(cls, config: "Config", topology: Topology) -> Self:
        _check_other_keys(config)
        shares, devices = config.parallel.division, topology.num_devices
        if shares is None:
            return cls(topology, Gradients.of(config, topology))
        unit = Division.of(config, devices).unit_of_slice
        counts = shares.sizes(config.train.batch_size, devices, topology.process_count, unit)
        return cls.with_counts(Way.of(config, topology), counts)

    @classmethod
    def with_counts(cls, way: Way, counts: tuple[int, ...]) -> Self:
        """Return a way of replicas with other slices."""
        # The gradients of slices of different sizes are complete when they are averaged: nothing can overlap.
        averaging = dataclasses.replace(way.gradients.averaging, buckets=1)
        return cls(way.topology, dataclasses.replace(way.gradients, averaging=averaging), counts)

    @property
    def parts(self) -> None:
        return None

    def check_batch_size(self, batch_size: int) -> None:
        """Do nothing: `of` checks the batch size."""

    def program(
        self, phases: Phases, *, resident: bool = False, compiler_options: Mapping[str, str] | None = None
    ) -> "UnequalProgram":
        phases = dataclasses.replace(phases, gradients=self.gradients, shares=self.shares)

        def read(first: Any, columns: Any = None) -> Batch:
            return gather_batch(first, columns, 0) if resident else first

        return UnequalProgram(phases, self, read, compiler_options)

    def step(self, phases: Phases, *, seed: int | None = None, **options: Any) -> TrainStep:
        program = self.program(phases, **options)
        if seed is None:
            return program
        key = self.topology.replicate(jax.random.key(seed))
        return lambda state, batch: program(state, batch, key)


def _check_other_keys(config: "Config") -> None:
    """Raise `InputError` if another key does not work with slices of different sizes."""
    key = Key("parallel.shares", config.parallel.shares)
    if config.model.batch_norm == "sync":
        raise InputError(
            *(key, ": "),
            Key.plain("model.batch_norm", "sync"),
            " communicates within the gradient, which each device computes by a program of its own",
            advice="set it to local or ghost:K",
        )
    if config.data.placement == "local":
        raise InputError(
            *(key, ": "),
            Key.plain("data.placement", "local"),
            " determines the slices by the examples of each process",
            advice="leave one of them out",
        )
    if config.train.sync_every is not None:
        other = Key.plain("train.sync_every", config.train.sync_every)
        raise InputError(*(key, ": "), other, " divides batches equally among groups", advice="leave one of them out")
    reasons = {
        "parallel.reproducible": "divides each batch into 8 equal shards",
        "parallel.shard_optimizer": "gathers the parameters in a program that all devices share",
        "parallel.buckets": "overlaps communication with a gradient that is complete before it is sent",
    }
    for name, reason in reasons.items():
        value = getattr(config.parallel, name.partition(".")[2])
        if value not in (None, False):
            raise InputError(*(key, ": "), Key.plain(name, value), f" {reason}", advice="leave one of them out")


@dataclass(frozen=True)
class Team:
    """The devices of this process whose slices have the same size; they run a program of their own on their shards.

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
    def of(cls, size: int, devices: dict[int, Device], first: int) -> "Team":
        """Create the team of some devices, by their places in the mesh of all devices.

        Args:
            first: the place of the first device of this process.
        """
        mesh = Mesh(np.array(list(devices.values())), (AXIS,), axis_types=(AxisType.Auto,))
        numbers = jax.device_put(np.array(list(devices), np.int32), NamedSharding(mesh, P(AXIS)))
        return cls(size, mesh, tuple(place - first for place in devices), numbers)

    def shards(self, tree: Any) -> Any:
        """Return arrays on the devices of the team that share the memory of their shards of the arrays of a tree.

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

        The spec decides whether a value varies over the devices. In a team of one device, the sharding itself does not
        tell, because a divided array is also whole on that device.
        """
        return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)

    def _sharding(self, leaf: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P() if leaf.sharding.is_fully_replicated else P(AXIS))

    def _shape(self, leaf: Any) -> tuple[int, ...]:
        if leaf.sharding.is_fully_replicated:
            return leaf.shape
        return len(self.places) * (leaf.shape[0] // len(leaf.sharding.device_set)), *leaf.shape[1:]


def teams_of(topology: Topology, counts: Sequence[int]) -> list[Team]:
    """Return the teams of this process's devices, given the size of each device's slice in mesh order."""
    own = set(topology.mesh.local_devices)
    devices = {place: device for place, device in enumerate(topology.mesh.devices.flat) if device in own}
    first = min(devices)
    return [
        Team.of(size, {place: device for place, device in devices.items() if counts[place] == size}, first)
        for size in sorted({counts[place] for place in devices}, reverse=True)
    ]


def join_teams(results: Sequence[Any], topology: Topology) -> Any:
    """Return arrays of the whole mesh, [devices, ...], from arrays of the teams, [devices of the team, ...].

    Args:
        results: the tree of each team's arrays, divided along their first axis.
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


@dataclass(frozen=True)
class UnequalStep:
    """The compiled programs of a step.

    Attributes:
        gradients: the program of each team of this process's devices.
        update: the program of all devices.
    """

    topology: Topology
    teams: Sequence[Team]
    gradients: Sequence[Callable[..., Contribution]]
    update: Callable[..., tuple[TrainState, MetricSums]]

    def __call__(self, state: TrainState, *feed: Any) -> tuple[TrainState, MetricSums]:
        return self.update(state, join_teams(self.compute(state, *feed), self.topology))

    def compute(self, state: TrainState, *feed: Any) -> list[Contribution]:
        """Return the sums over the slices of each team's devices, [devices of the team, ...]."""
        arguments = _without_optimizer(state), *feed
        return [
            program(team.numbers, *team.shards(arguments))
            for team, program in zip(self.teams, self.gradients, strict=True)
        ]


class UnequalProgram(Program):
    """The programs of a step, compiled on first use for each set of argument shapes.

    It is called like the program of `Way.program`, for a single step.

    Args:
        phases: the phases of the step.
        read: returns the batch of a device from the arguments between the state and the key. In these arguments,
            batches have no padding.
    """

    def __init__(
        self,
        phases: Phases,
        way: Unequal,
        read: Callable[..., Batch] = lambda batch: batch,
        compiler_options: Mapping[str, str] | None = None,
    ):
        # No single jitted function computes the step, and its memory for another batch size is not estimated.
        super().__init__(None)
        topology, counts = way.topology, way.counts
        self._phases, self._topology, self._read = phases, topology, read
        self._examples, self._slot, self._options = sum(counts), max(counts), dict(compiler_options or {})
        self._teams = teams_of(topology, counts)
        update = jax.shard_map(self._update_state, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P())
        self._update = jax.jit(update, donate_argnums=0, compiler_options=self._options)

    def check(self, state: TrainState, *feed: Any) -> None:
        """Trace the programs for a feed.

        Raises:
            InputError: see `Way.step`; or the network or the loss communicates between devices.
        """
        team = self._teams[0]
        arguments = team.shapes((_without_optimizer(state), *feed))
        traced = self._gradient_of(team, arguments).trace(team.numbers, *arguments)
        lost = "parallel.shares cannot detect, and so accepts, a network that communicates between devices"
        if operation := find_collective(traced.jaxpr, lost):
            raise InputError(
                Key("parallel.shares"),
                f": the network or the loss communicates between devices ({operation.primitive.name}), but each device "
                "computes its gradient by a program of its own",
                advice="remove it, for example a batch norm with axis_name",
            )
        self._update.eval_shape(state, self._joined_shapes(traced.out_info))

    def _compile(self, state: TrainState, *feed: Any) -> UnequalStep:
        programs, costs, shapes = [], [], None
        for team in self._teams:
            arguments = team.shapes((_without_optimizer(state), *feed))
            function = self._gradient_of(team, arguments)
            program, cost = compile_with_cost(function, team.numbers, *arguments)
            shapes = function.eval_shape(team.numbers, *arguments)
            programs.append(program)
            costs.append(cost)
        update, cost = compile_with_cost(self._update, state, self._joined_shapes(shapes))
        step = UnequalStep(self._topology, self._teams, programs, update)
        self.cost = self._cost_of(costs, cost)
        self._compiled[shapes_of(feed)] = step, self.cost
        return step

    def _gradient_of(self, team: Team, arguments: tuple[Any, ...]) -> Any:
        """Return the jitted function of a team's numbers, state and feed that computes its sums."""

        def on_device(number: jax.Array, state: TrainState, *feed: Any) -> Contribution:
            *inputs, key = (self._without_padding(part, team.size) for part in feed)
            result = self._phases.slice_gradient(state, self._read(*inputs), key, number[0])
            weight = team.size * self._topology.num_devices / self._examples
            weighted = jax.tree.map(lambda leaf: leaf * weight if _is_float(leaf) else leaf, result.model_state)
            return jax.tree.map(lambda leaf: leaf[None], varying(result._replace(model_state=weighted)))

        in_specs = P(AXIS), *team.specs(arguments)
        sharded = jax.shard_map(on_device, mesh=team.mesh, in_specs=in_specs, out_specs=P(AXIS))
        return jax.jit(sharded, compiler_options=self._options)

    def _update_state(self, state: TrainState, stacked: Contribution) -> tuple[TrainState, MetricSums]:
        contribution = self._phases.combine(state, jax.tree.map(lambda leaf: leaf[0], stacked))
        return self._phases.update(state, contribution, lambda: all_finite(contribution.undivided))

    def _without_padding(self, part: Any, size: int) -> Any:
        """Return an argument in which batches have the examples of a slice of `size`, without the rest of the slot."""
        if not isinstance(part, Batch):
            return part
        return jax.tree.map(lambda column: column[: len(column) * size // self._slot], part)

    def _joined_shapes(self, shapes: Any) -> Any:
        devices, sharding = self._topology.num_devices, self._topology.sharded
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((devices, *leaf.shape[1:]), leaf.dtype, sharding=sharding), shapes
        )

    def _cost_of(self, gradients: Sequence[Cost], update: Cost) -> Cost:
        """Return the cost of a step on all devices, from the programs of this process."""
        computed = sum(team.size * len(team.places) for team in self._teams)
        flops = {
            dtype: sum(cost.flops_of.get(dtype, 0) for cost in gradients) * self._examples // computed
            for dtype in {dtype for cost in gradients for dtype in cost.flops_of}
        }
        memory = [cost.memory for cost in (*gradients, update)]
        return Cost(flops, None if None in memory else _Memory.of(memory[:-1], memory[-1]))


class _Memory(NamedTuple):
    """The memory of a step on the device that needs most, with the names of XLA's `CompiledMemoryStats`."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int

    @classmethod
    def of(cls, gradients: Sequence[Any], update: Any) -> "_Memory":
        """Return the memory of the programs of the gradients and of the update, which run one after the other.

        The sums of a device are an output of the first program and an argument of the second, so they are temporary.
        """
        sums = max(stats.output_size_in_bytes for stats in gradients)
        temporary = sums + max(stats.temp_size_in_bytes for stats in (*gradients, update))
        return cls(
            update.argument_size_in_bytes - sums,
            update.output_size_in_bytes,
            update.alias_size_in_bytes,
            temporary,
        )


def _without_optimizer(state: TrainState) -> TrainState:
    """Return the arrays of a state that a gradient depends on."""
    return state.replace(opt_state=())


def _is_float(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
