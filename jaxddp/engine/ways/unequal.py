"""Slices of a batch that differ in size, for devices that differ in speed.

In a program that all devices share, every slice has the same shape, so a small slice would be padded to the size of the
largest, and take as long. Therefore such a step has two programs. In the first, each device computes the gradient of
its own slice, without communication; the devices of a process whose slices have the same size share this program. In
the second, which all devices share, the gradients are averaged and the state is updated. The slots of a batch have the
size of the largest slice, but nothing is computed for their padding.

The gradient of a slice is a sum over examples, and the average is divided by the average number of examples. So the
mean is exact for any sizes. Model states, such as batch statistics, are averaged with the sizes as weights.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax import NamedSharding, P
from jax.sharding import AxisType, Mesh

from jaxddp.core.errors import Key
from jaxddp.data.batch import Batch, Division
from jaxddp.engine.gradients import Contribution, is_float
from jaxddp.engine.programs import Options, Program, StepResult, TrainStep, gather_batch
from jaxddp.engine.state import TrainState, all_finite
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.reproducible import SHARDS, check_no_collective
from jaxddp.engine.ways.way import Way, refuse_others
from jaxddp.measure.cost import Cost, compile_traced
from jaxddp.mesh import AXIS, Topology, varying

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
        others: dict[tuple[str, str | None], str] = {
            ("model.batch_norm", "sync"): "communicates within a gradient, which each device computes by itself",
            ("data.placement", "local"): "determines the slices by the examples of each process",
            ("train.sync_every", None): "divides batches equally",
            ("parallel.reproducible", None): f"divides each batch into {SHARDS} equal shards",
            ("parallel.shard_optimizer", None): "gathers the parameters within a gradient",
            ("parallel.buckets", None): "overlaps communication with a gradient that is complete before",
        }
        refuse_others(config, Key("parallel.shares", config.parallel.shares), others)
        shares: Any = config.parallel.division
        devices = topology.num_devices
        unit = Division.of(config, devices).unit_of_slice
        counts = shares.lengths(config.train.batch_size, devices, topology.peers.process_count, unit)
        return cls.with_counts(Way.of(config, topology), counts)

    @classmethod
    def with_counts(cls, way: Way, counts: tuple[int, ...]) -> Self:
        """Return a way of replicas with other slices."""
        # The gradients of slices of different sizes are complete when they are averaged: nothing can overlap.
        averaging = replace(way.gradients.averaging, buckets=1)
        return cls(way.topology, replace(way.gradients, averaging=averaging), counts)

    @property
    def parts(self) -> None:
        return None

    def check_batch_size(self, batch_size: int) -> None:
        """Do nothing: `of` checks the batch size."""

    def program(self, phases: Phases, **options: Any) -> "UnequalProgram":
        phases = replace(phases, gradients=self.gradients, shares=self.shares)
        return UnequalProgram(phases, self, **options)

    def step(self, phases: Phases, **options: Any) -> TrainStep:
        return self.program(phases, **options)


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
    teams, first = [], min(devices)
    for size in sorted({counts[place] for place in devices}, reverse=True):
        members = {place: device for place, device in devices.items() if counts[place] == size}
        mesh = Mesh(np.array([*members.values()]), (AXIS,), axis_types=(AxisType.Auto,))
        numbers = jax.device_put(np.array([*members], np.int32), NamedSharding(mesh, P(AXIS)))
        teams.append(Team(size, mesh, tuple(place - first for place in members), numbers))
    return teams


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
    update: Callable[..., StepResult]

    def __call__(self, state: TrainState, *feed: Any) -> StepResult:
        return self.update(state, join_teams(self.compute(state, *feed), self.topology))

    def compute(self, state: TrainState, *feed: Any) -> list[Contribution]:
        """Return the sums over the slices of each team's devices, [devices of the team, ...]."""
        arguments = state.replace(opt_state=()), *feed
        pairs = zip(self.teams, self.gradients, strict=True)
        return [program(team.numbers, *team.shards(arguments)) for team, program in pairs]


class UnequalProgram(Program):
    """The programs of a step, compiled on first use for each set of argument shapes.

    It is called like the program of `Way.program`, for a single step. Batches have no padding within a slice.
    """

    def __init__(self, phases: Phases, way: Unequal, resident: bool = False, compiler_options: Options | None = None):
        # No single jitted function computes the step, and its memory for another batch size is not estimated.
        super().__init__(None)
        topology, counts = way.topology, way.counts
        self._phases, self._topology, self._resident = phases, topology, resident
        self._examples, self._slot, self._options = sum(counts), max(counts), dict(compiler_options or {})
        self._teams = teams_of(topology, counts)
        update = jax.shard_map(self._update_state, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P())
        self._update = jax.jit(update, donate_argnums=0, compiler_options=self._options)

    def check(self, state: TrainState, *feed: Any) -> Any:
        """Trace the programs for a feed, and return the jaxpr of a team's gradients.

        Raises:
            InputError: see `Way.step`; or the network or the loss communicates between devices.
        """
        traced = self._trace(self._teams[0], state, feed)
        check_no_collective(traced.jaxpr, Key("parallel.shares"), "each device computes its gradient separately")
        self._update.eval_shape(state, self._joined_shapes(traced.out_info))
        return traced.jaxpr

    def _compile(self, state: TrainState, *feed: Any) -> tuple[UnequalStep, Cost]:
        traces = [self._trace(team, state, feed) for team in self._teams]
        update = self._update.trace(state, self._joined_shapes(traces[0].out_info))
        (*programs, update), costs = zip(*map(compile_traced, (*traces, update)), strict=True)
        return UnequalStep(self._topology, self._teams, programs, update), self._cost_of(*costs)

    def _trace(self, team: Team, state: TrainState, feed: tuple[Any, ...]) -> Any:
        """Trace the function of a team's numbers, state and feed that computes its sums."""

        def on_device(number: jax.Array, state: TrainState, *feed: Any) -> Contribution:
            *inputs, key = (self._without_padding(part, team.size) for part in feed)
            batch = gather_batch(inputs[0], inputs[1], 0) if self._resident else inputs[0]
            result = self._phases.gradient(state, batch, key, number[0])
            weight = team.size * self._topology.num_devices / self._examples
            means = jax.tree.map(lambda leaf: leaf * weight if is_float(leaf) else leaf, result.model_state)
            return jax.tree.map(lambda leaf: leaf[None], varying(result._replace(model_state=means)))

        shapes = team.shapes((state.replace(opt_state=()), *feed))
        # A spec decides whether a value varies over the devices. In a team of one device the sharding does not tell,
        # because a divided array is also whole on that device.
        in_specs = P(AXIS), *jax.tree.map(lambda leaf: leaf.sharding.spec, shapes)
        sharded = jax.shard_map(on_device, mesh=team.mesh, in_specs=in_specs, out_specs=P(AXIS))
        return jax.jit(sharded, compiler_options=self._options).trace(team.numbers, *shapes)

    def _update_state(self, state: TrainState, stacked: Contribution) -> StepResult:
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

    def _cost_of(self, *costs: Cost) -> Cost:
        """Return the cost of a step on all devices, from the programs of this process, of which the last updates."""
        *gradients, _ = costs
        computed = sum(team.size * len(team.places) for team in self._teams)
        flops = sum((Counter(cost.flops_of) for cost in gradients), Counter[str]())
        flops_of = {dtype: count * self._examples // computed for dtype, count in flops.items()}
        *stats, update = (cost.memory for cost in costs)
        if None in (*stats, update):
            return Cost(flops_of, None)
        # The programs run one after the other. The sums of a device are an output of the first program and an argument
        # of the second, so they are temporary.
        sums = max(each.output_size_in_bytes for each in stats)
        memory = SimpleNamespace(
            argument_size_in_bytes=update.argument_size_in_bytes - sums,
            output_size_in_bytes=update.output_size_in_bytes,
            alias_size_in_bytes=update.alias_size_in_bytes,
            temp_size_in_bytes=sums + max(each.temp_size_in_bytes for each in (*stats, update)),
        )
        return Cost(flops_of, memory)
