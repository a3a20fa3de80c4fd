"""The ways in which devices divide a training step, and the ordinary one, in which all average each gradient.

A run has one `Way`, which `jaxddp.engine.ways.choice` chooses from its config. It knows which examples of a batch each
device computes, how the state lies on the devices, the programs of a step, and what the devices do between two steps.
Everything else calls the methods of the run's way, and never asks which it is. Each module of this folder is a way: a
subclass that changes what differs from replicas.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import jax
import numpy as np
from jax import NamedSharding, P

from jaxddp.config.goal import name_with_split
from jaxddp.core.errors import InputError, Key, Words, counted
from jaxddp.data.batch import Batch
from jaxddp.engine import programs
from jaxddp.engine.gradients import Gradients
from jaxddp.engine.objective import TrainObjective
from jaxddp.engine.programs import Options, Program, TrainStep
from jaxddp.engine.state import TrainState, all_finite, check_types
from jaxddp.engine.step import Phases
from jaxddp.mesh import AXIS, Device, Topology, check_divisible
from jaxddp.models.interface import without_frozen

if TYPE_CHECKING:
    from jaxddp.config import Config
    from jaxddp.engine.parts.part import Follow, Part


class Copies(NamedTuple):
    """Arrays of a state that several devices hold, and that must have the same bits on each of them."""

    arrays: Any
    mesh: jax.sharding.Mesh
    spec: P
    """The sharding of the arrays on the mesh."""
    holders: Sequence[Device]


@dataclass(frozen=True)
class Way:
    """Every device holds a replica of the state and differentiates an equal slice of the batch (see the module).

    The `repr` is the text on which the processes of a job agree. Programs are compiled on first use.

    Attributes:
        topology: the devices.
        gradients: the computation of a slice's gradient, and its average over the devices.
    """

    topology: Topology = field(repr=False)
    gradients: Gradients = field(default_factory=Gradients)

    counts: ClassVar[tuple[int, ...]] = ()
    """The number of examples of each device's slice, in mesh order; empty if all slices are equal."""
    has_loop: ClassVar[bool] = True
    """Whether a program may compute several steps."""
    stacked: ClassVar[int] = 1
    """The number of states that the devices train between two meetings, which a state of `placed` stacks."""

    @classmethod
    def of(cls, config: "Config", topology: Topology) -> Self:
        """Return the way of a config. Raises: InputError if another key of the config conflicts with this way."""
        return cls(topology, Gradients.of(config, topology))

    @property
    def program_key(self) -> tuple[str, int]:
        """Ways of the same topology with the same text have the same programs."""
        return str(self), id(self.topology)

    # The batch

    @property
    def shares(self) -> int:
        """The number of equal slices of the global batch whose gradients are averaged."""
        return self.topology.num_devices

    @property
    def parts(self) -> int | None:
        """The number of equal parts of a batch that the network computes separately.

        None if the parts differ in size. They then fit the settings that combine examples, such as ghost batches.
        """
        return self.shares * self.gradients.accumulate

    def check_batch_size(self, batch_size: int) -> None:
        """Raise `InputError` if a batch cannot be divided into equal slices. The message suggests another size."""
        accumulate, shares = self.gradients.accumulate, self.shares
        owners: Words = counted(shares, "device" if shares == self.topology.num_devices else "shard")
        if accumulate > 1:
            owners = owners, " with ", Key("train.accumulate", accumulate), " microbatches each"
        check_divisible(Key("train.batch_size", batch_size), shares * accumulate, owners)

    def slices(self, slots: int) -> list[tuple[Device, slice]]:
        """Return each device, in mesh order, with the rows that it computes of a batch with this number of slots."""
        counts = self.counts or [slots // self.topology.num_devices] * self.topology.num_devices
        places = [slice(end - count, end) for count, end in zip(counts, itertools.accumulate(counts), strict=True)]
        return list(zip(self.topology.mesh.devices.flat, places, strict=True))

    # The state

    def specs(self, state: TrainState) -> Any:
        """Return the `PartitionSpec` of each array of a state, or of its shapes, between two steps."""
        return jax.tree.map(lambda leaf: P(), state)

    def shardings(self, state: TrainState) -> Any:
        """Return the sharding of each array of a state; see `specs`."""
        place = functools.partial(NamedSharding, self.mesh)
        return jax.tree.map(place, self.specs(state), is_leaf=lambda leaf: isinstance(leaf, P))

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of `specs`."""
        return self.topology.mesh

    def jit_init(self, init: Callable[..., TrainState], compiler_options: Options) -> Callable[..., TrainState]:
        """Compile (on first use) the initialization of a state."""
        return jax.jit(init, out_shardings=self.topology.replicated, compiler_options=dict(compiler_options))

    def placed(self, state: TrainState) -> TrainState:
        """Return an initial state as the steps take it; the argument may be consumed."""
        return state

    def whole(self, state: TrainState) -> TrainState:
        """Return a state whose parameters and parts' arrays every device holds, for an evaluation."""
        return state

    def result(self, state: TrainState) -> TrainState:
        """Return the state of `whole`, with the optimizer's state, for the end of a run."""
        return self.whole(state)

    def copies(self, state: TrainState) -> Iterator[Copies]:
        """Yield the arrays that several devices hold. An array that is divided among all devices has no copies."""
        arrays = jax.tree.map(lambda leaf: leaf if leaf.sharding.is_fully_replicated else None, state)
        yield Copies(arrays, self.topology.mesh, P(), [*self.topology.mesh.devices.flat])

    # The step

    def check(self, parts: Sequence["Part"], opt_state: Any) -> None:
        """Raise `InputError` if the way contradicts a part of the step, or the optimizer, whose state is given."""

    def check_own_loop(self) -> None:
        """Raise `InputError` if the way needs more between two steps than a loop of the user does."""

    def program(self, phases: Phases, *, resident: bool = False, **options: Any) -> Program:
        """Return the program of the training steps; see `step`."""
        step = self.step(phases, resident=resident, **options)
        return Program(step, programs.steps_in) if resident else Program(step)

    def step(self, phases: Phases, *, resident: bool = False, compiler_options: Options | None = None) -> TrainStep:
        """Compile (on first use) an optimizer step over the global batch, or several steps on `resident` images.

        The compiled function takes a state, whose memory is donated, a batch placed by `Topology.place`, and the run's
        key, which may be left out. It returns the new state and the step's sums over the global batch. On resident
        images it takes the images and columns of `steps_on_residents` in place of the batch.

        Raises:
            InputError: when the step is traced, if the optimizer, the model or a part changes the names, shapes or
                dtypes of the state.
        """
        one_step = self.one_step(replace(phases, gradients=self.gradients, shares=self.shares))
        feed = programs.RESIDENT_FEED if resident else (P(AXIS),)
        steps = programs.steps_on_residents(one_step, self.gather) if resident else one_step
        on_devices = self.on_devices(steps, feed)

        @functools.wraps(steps)
        def step(*arguments: Any) -> tuple[TrainState, Any]:
            return on_devices(*arguments, *[None] * (len(feed) + 2 - len(arguments)))

        return jax.jit(step, donate_argnums=0, compiler_options=dict(compiler_options or {}))

    def one_step(self, phases: Phases) -> TrainStep:
        """Return the optimizer step of one device on its slice of the batch, for a call inside `jax.shard_map`."""

        def local_step(state: TrainState, batch: Batch, key: jax.Array | None = None) -> tuple[TrainState, Any]:
            contribution = phases.gradient(state, batch, key)
            return phases.update(state, contribution, lambda: all_finite(contribution.undivided))

        return local_step

    def on_devices(self, one_step: TrainStep, feed: tuple[P, ...]) -> TrainStep:
        """Return the step of all devices, a function of global arrays.

        Args:
            feed: the shardings of the arguments between the state and the key.
        """
        return jax.shard_map(one_step, mesh=self.mesh, in_specs=(P(), *feed, P()), out_specs=P())

    @property
    def gather(self) -> Callable[..., Batch]:
        """The function that reads a batch for `one_step` from resident images; see `gather_batch`."""
        return programs.gather_batch

    def gradient(self, objective: TrainObjective) -> Callable[[TrainState, Batch], Any]:
        """Return the average gradient of a batch in evaluation, as a function of a state and a batch."""

        def averaged(state: TrainState, batch: Batch) -> Any:
            specs = self.specs(state)
            gradients = self.gradients_of(specs)

            def local(state: TrainState, batch: Batch) -> Any:
                return gradients.of_batch(objective, state, batch, jax.random.key(0), train=False).grads

            trained = without_frozen(specs.params, gradients.frozen)
            return jax.shard_map(local, mesh=self.mesh, in_specs=(specs, P(AXIS)), out_specs=trained)(state, batch)

        return averaged

    def gradients_of(self, specs: Any) -> Gradients:
        """Return the computation of the gradient for a state with these specs."""
        return self.gradients

    # Between two steps

    def connect(self) -> None:
        """Run the first collectives over all processes; see `Topology.connect`."""
        self.topology.connect()

    def meet(self, state: TrainState) -> TrainState:
        """Return the state after a meeting of the devices, which `Plan.syncs` makes due. The argument is consumed."""
        return state

    def prepare_meeting(self, state: TrainState) -> Any:
        """Compile the program of `meet`, and return the executable; None if there is none."""

    def fetch(self, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
        """Return arrays of a step's results on the host. All processes call it together."""
        return jax.device_get(list(arrays))

    def follow(self, parts: Sequence["Part"]) -> "Follow":
        """Return a function that passes the metrics of a validation to the parts that follow validations.

        Each of the states that the devices train gets the same metrics.

        Raises:
            InputError: raised by the returned function if a part changes the names, shapes or dtypes of its arrays.
        """
        following = [part for part in parts if part.follows]

        def update(arrays: dict[str, jax.Array], metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return {part.name: part.validated(arrays[part.name], metrics) for part in following}

        updated = self.jit_between(update)

        def follow(state: TrainState, metrics: Mapping[str, float | None]) -> TrainState:
            if not following:
                return state
            values = {
                name_with_split(name): np.float32(np.nan if value is None else value) for name, value in metrics.items()
            }
            arrays = {part.name: state.parts[part.name] for part in following}
            after = state.replace(parts={**state.parts, **updated(arrays, self.topology.replicate(values))})
            return check_types(state, after, "the parts that follow a validation")

        return follow

    def jit_between(self, update: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Compile (on first use) a function of arrays of a state, and of values that all devices hold."""
        return jax.jit(update, out_shardings=self.topology.replicated)


def refuse_others(config: "Config", key: Key, others: Mapping[tuple[str, str | None], str]) -> None:
    """Raise `InputError` if another key of the config conflicts with the key of a way.

    Args:
        others: what each other key does, by its name and the value that conflicts; None for any value.
    """
    for (name, conflicting), what in others.items():
        section, field_name = name.split(".")
        value = getattr(getattr(config, section), field_name)
        if value == conflicting if conflicting else value not in (None, False):
            raise InputError(key, ": ", Key.plain(name, value), f" {what}", advice="leave one of them out")
