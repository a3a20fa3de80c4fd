"""A training step whose devices have slices of different sizes.

In a program that all devices share, every slice has the same shape, so a small slice would be padded to the size of the
largest, and take as long. Therefore such a step has two programs. In the first, each device computes the gradient of
its own slice, without communication; the devices of a process whose slices have the same size share this program. In
the second, which all devices share, the gradients are averaged and the state is updated. The slots of a batch have the
size of the largest slice, but nothing is computed for their padding.

The gradient of a slice is a sum over examples, and the average is divided by the average number of examples. So the
mean is exact for any sizes. Model states, such as batch statistics, are averaged with the sizes as weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxddp.core.errors import InputError, Key
from jaxddp.data.batch import Batch
from jaxddp.engine.gradients import Contribution
from jaxddp.engine.objective import MetricSums
from jaxddp.engine.programs import Program, shapes_of
from jaxddp.engine.reproducible import find_collective
from jaxddp.engine.state import TrainState, all_finite
from jaxddp.engine.step import Phases
from jaxddp.engine.unequal.device_groups import DeviceGroup, groups_of, join_groups
from jaxddp.measure.cost import Cost, compile_with_cost
from jaxddp.mesh import AXIS, Topology, varying

ReadBatch = Callable[..., Batch]
"""Maps the arguments of a step between the state and the key to the batch of a device."""


@dataclass(frozen=True)
class UnequalStep:
    """The compiled programs of a step.

    Attributes:
        gradients: the program of each group of this process's devices.
        update: the program of all devices.
    """

    topology: Topology
    groups: Sequence[DeviceGroup]
    gradients: Sequence[Callable[..., Contribution]]
    update: Callable[..., tuple[TrainState, MetricSums]]

    def __call__(self, state: TrainState, *feed: Any) -> tuple[TrainState, MetricSums]:
        return self.update(state, join_groups(self.compute(state, *feed), self.topology))

    def compute(self, state: TrainState, *feed: Any) -> list[Contribution]:
        """Return the sums over the slices of each group's devices, [devices of the group, ...]."""
        arguments = _without_optimizer(state), *feed
        return [
            program(group.numbers, *group.shards(arguments))
            for group, program in zip(self.groups, self.gradients, strict=True)
        ]


class UnequalProgram(Program):
    """The programs of a step, compiled on first use for each set of argument shapes.

    It is called like the program of `jaxddp.engine.step.make_train_step`, or like that of a single step of
    `jaxddp.engine.programs.make_resident_steps`.

    Args:
        phases: the phases of the step.
        sizes: the number of examples of each device's slice, in mesh order.
        read: returns the batch of a device from the arguments between the state and the key. In these arguments,
            batches have no padding.
    """

    def __init__(
        self,
        phases: Phases,
        topology: Topology,
        sizes: Sequence[int],
        read: ReadBatch = lambda batch: batch,
        compiler_options: Mapping[str, str] | None = None,
    ):
        # No single jitted function computes the step, and its memory for another batch size is not estimated.
        super().__init__(None)
        self._phases, self._topology, self._read = phases, topology, read
        self._examples, self._slot, self._options = sum(sizes), max(sizes), dict(compiler_options or {})
        self._groups = groups_of(topology, sizes)
        update = jax.shard_map(self._update_state, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P())
        self._update = jax.jit(update, donate_argnums=0, compiler_options=self._options)

    def check(self, state: TrainState, *feed: Any) -> None:
        """Trace the programs for a feed.

        Raises:
            InputError: see `make_local_step`; or the network or the loss communicates between devices.
        """
        group = self._groups[0]
        arguments = group.shapes((_without_optimizer(state), *feed))
        traced = self._gradient_of(group, arguments).trace(group.numbers, *arguments)
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
        for group in self._groups:
            arguments = group.shapes((_without_optimizer(state), *feed))
            function = self._gradient_of(group, arguments)
            program, cost = compile_with_cost(function, group.numbers, *arguments)
            shapes = function.eval_shape(group.numbers, *arguments)
            programs.append(program)
            costs.append(cost)
        update, cost = compile_with_cost(self._update, state, self._joined_shapes(shapes))
        step = UnequalStep(self._topology, self._groups, programs, update)
        self.cost = self._cost_of(costs, cost)
        self._compiled[shapes_of(feed)] = step, self.cost
        return step

    def _gradient_of(self, group: DeviceGroup, arguments: tuple[Any, ...]) -> Any:
        """Return the jitted function of a group's numbers, state and feed that computes its sums."""

        def on_device(number: jax.Array, state: TrainState, *feed: Any) -> Contribution:
            *inputs, key = (self._without_padding(part, group.size) for part in feed)
            result = self._phases.slice_gradient(state, self._read(*inputs), key, number[0])
            weight = group.size * self._topology.num_devices / self._examples
            weighted = jax.tree.map(lambda leaf: leaf * weight if _is_float(leaf) else leaf, result.model_state)
            return jax.tree.map(lambda leaf: leaf[None], varying(result._replace(model_state=weighted)))

        in_specs = P(AXIS), *group.specs(arguments)
        sharded = jax.shard_map(on_device, mesh=group.mesh, in_specs=in_specs, out_specs=P(AXIS))
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
        computed = sum(group.size * len(group.places) for group in self._groups)
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
