"""Groups of devices, each of which trains its own parameters between two averages.

The devices of a group average their gradients in each step. Different groups average their parameters only at a
meeting, after many steps. The state of a run stacks the states of its groups along a first axis of every array, which
is divided among the groups. Only the step's number and the arrays of the outer optimizer are the same in all groups,
and they are not stacked.

The meeting is a program of its own. A condition in the program of the steps would need all parameters of all groups at
each step to be ready for a collective, and the host would wait for it (see BUILD_NOTES.md, decision 6).
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import NamedSharding, P, lax
from jax.sharding import AxisType, Mesh

from jaxddp.core.errors import InputError, Key, counted
from jaxddp.data.batch import Batch
from jaxddp.engine.gradients import Gradients
from jaxddp.engine.objective import TrainObjective
from jaxddp.engine.optimizer import is_schedule_free
from jaxddp.engine.parts.averages import Lookahead
from jaxddp.engine.programs import TrainStep
from jaxddp.engine.state import DEVICE_GROUPS, NUMBERS, TrainState, merged, without_shared
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Copies, Way, refuse_others
from jaxddp.mesh import AXIS, GROUP, Topology, varying
from jaxddp.models.interface import with_frozen, with_frozen_state, without_frozen

if TYPE_CHECKING:
    from jaxddp.config import Config
    from jaxddp.engine.parts.part import Part

ANCHOR, OPT_STATE = "anchor", "opt_state"


@dataclass(frozen=True)
class OuterOptimizer:
    """Continues from the average of the groups' parameters, or moves to it with Nesterov momentum.

    Without momentum the groups continue from the average (local SGD: Stich 2018, arXiv:1805.09767). With momentum, the
    difference between the parameters after the last average, the anchor, and the new average is the gradient of SGD
    with Nesterov momentum, which updates the anchor, and the groups continue from it (DiLoCo: Douillard et al. 2023,
    arXiv:2311.08105).

    Attributes:
        learning_rate: the learning rate of the momentum's update; not used without momentum.
        momentum: None for no momentum.
    """

    learning_rate: float = 1.0
    momentum: float | None = None

    def init(self, params: Any) -> dict[str, Any]:
        """Return the state of the outer optimizer for the initial trained parameters."""
        if self.momentum is None:
            return {}
        # Copy, because a donated state must not hold a buffer twice.
        return {ANCHOR: jax.tree.map(jnp.copy, params), OPT_STATE: self._rule.init(params)}

    def update(self, own: dict[str, Any], mean: Any) -> tuple[dict[str, Any], Any]:
        """Return the next state, and the parameters from which all groups continue.

        Args:
            own: the state, of `init` or of the last update.
            mean: the average of the groups' trained parameters.
        """
        if self.momentum is None:
            return own, mean
        anchor = own[ANCHOR]
        gradient = jax.tree.map(jnp.subtract, anchor, mean)
        updates, opt_state = self._rule.update(gradient, own[OPT_STATE], anchor)
        params = optax.apply_updates(anchor, updates)
        return {**own, ANCHOR: params, OPT_STATE: opt_state}, params

    @property
    def _rule(self) -> optax.GradientTransformation:
        return optax.sgd(self.learning_rate, self.momentum, nesterov=True)


@dataclass(frozen=True)
class Groups(Way):
    """Groups of equally many devices, which are neighbours in the order of the topology.

    Attributes:
        stacked: the number of groups, at least 2.
        outer: the optimizer that combines the parameters of the groups.
    """

    stacked: int = 2  # pyright: ignore[reportIncompatibleVariableOverride]
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)

    @classmethod
    def of(cls, config: "Config", topology: Topology) -> Self:
        """Return the groups of a config, by default one for each process."""
        train, devices = config.train, topology.num_devices
        subject, key = Key("train.sync_every", train.sync_every, f'"{train.sync_every}"'), Key("parallel.groups")
        if config.parallel.groups is None and topology.peers.is_alone:
            problem = ": a single process is a single group of devices"
            raise InputError(subject, problem, advice=("give ", key, ", or leave it out"))
        count = config.parallel.groups or topology.peers.process_count
        if devices % count:
            fitting = ", ".join(str(each) for each in range(2, devices + 1) if devices % each == 0)
            advice = f"{fitting} would do" if fitting else "use more devices"
            problem = f" does not divide {counted(devices, 'device')}"
            raise InputError(Key("parallel.groups", count), problem, advice=advice)
        refuse_others(config, subject, {("parallel.shard_optimizer", None): "divides a state that each device keeps"})
        first = Topology(Mesh(topology.mesh.devices[: devices // count], (AXIS,)), topology.peers)
        has_momentum = train.outer_optimizer != "mean"
        outer = OuterOptimizer(train.outer_rate, train.outer_momentum) if has_momentum else OuterOptimizer()
        return cls(topology, Gradients.of(config, first), count, outer)

    @functools.cached_property
    def mesh(self) -> Mesh:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The devices of the run in the same order, with an axis for the groups and one within a group."""
        devices = self.topology.mesh.devices.reshape(self.stacked, -1)
        return Mesh(devices, (GROUP, AXIS), axis_types=(AxisType.Auto, AxisType.Auto))

    @property
    def _size(self) -> int:
        """The number of devices in a group."""
        return self.topology.num_devices // self.stacked

    def _sharding(self, *axes: str) -> NamedSharding:
        return NamedSharding(self.mesh, P(*axes))

    # The state

    def specs(self, state: TrainState) -> Any:
        """Return the specs of a stacked state, a prefix of its tree."""
        parts = {name: P() if name == DEVICE_GROUPS else P(GROUP) for name in state.parts}
        fields: dict[str, Any] = dict.fromkeys(("params", "model_state", "opt_state"), P(GROUP))
        return state.replace(step=P(), parts=parts, **fields)

    def placed(self, state: TrainState) -> TrainState:
        shardings = self.shardings(jax.eval_shape(self.stack, state))
        after = jax.block_until_ready(jax.jit(self.stack, out_shardings=shardings)(state))
        # The step's number may share its memory with the result.
        for leaf in jax.tree.leaves(state.replace(step=())):
            leaf.delete()
        return after

    def stack(self, state: TrainState) -> TrainState:
        """Return a state with the same state for every group, and with the initial arrays of the outer optimizer."""
        after = self._repeated(state.replace(step=()))
        numbers = jnp.arange(self.stacked, dtype=jnp.int32)
        shared = {NUMBERS: numbers, **self.outer.init(without_frozen(state.params, self.gradients.frozen))}
        return after.replace(step=state.step, parts={**after.parts, DEVICE_GROUPS: shared})

    def _repeated(self, arrays: Any) -> Any:
        """Return arrays repeated for each group, [groups, …]. Call it inside `jax.jit`."""
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.stacked, *leaf.shape)), arrays)

    def whole(self, state: TrainState) -> TrainState:
        """Return the average of the groups' states, without the optimizer's state, which saves communication."""
        return self.result(state.replace(opt_state=()))

    def result(self, state: TrainState) -> TrainState:
        """Return the average of the groups' states."""
        if state.stacked is None:
            return state
        step = jax.device_put(state.step, self.topology.replicated)
        return self._average(without_shared(state).replace(step=())).replace(step=step)

    @functools.cached_property
    def _average(self) -> Callable[[Any], Any]:
        return jax.jit(self.mean, out_shardings=self.topology.replicated)

    def mean(self, arrays: Any) -> Any:
        """Return the means of floats over the groups, and the largest of other numbers. Call it inside `jax.jit`.

        Each device averages a slice with the devices of the same place in other groups. The devices of a group then
        gather the slices. So all slices together pass between the groups once.

        Args:
            arrays: arrays [groups, …], divided among the groups.
        """
        leaves, structure = jax.tree.flatten(arrays)
        rows = [leaf.reshape(self.stacked, -1) for leaf in leaves]
        buckets: dict[Any, list[int]] = {}
        for index, row in enumerate(rows):
            buckets.setdefault(row.dtype if self.gradients.averaging.ravels else index, []).append(index)
        means: dict[int, jax.Array] = {}
        for bucket in buckets.values():
            mean = self._mean_in_slices(jnp.concatenate([rows[index] for index in bucket], axis=1))
            ends = itertools.accumulate(rows[index].shape[1] for index in bucket)
            means |= zip(bucket, jnp.split(mean, [*ends][:-1]), strict=True)
        shaped = [means[index].reshape(leaf.shape[1:]) for index, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, shaped)

    def _mean_in_slices(self, rows: jax.Array) -> jax.Array:
        """Return the mean of [groups, values] over the groups: [values]."""
        length = rows.shape[1]
        if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
            return rows[0]
        rows = jnp.pad(rows, ((0, 0), (0, -length % self._size)))
        place = lambda array, *axes: lax.with_sharding_constraint(array, self._sharding(*axes))  # noqa: E731
        mean = place(merged(place(rows, GROUP, AXIS)), AXIS)
        return place(mean)[:length]

    def copies(self, state: TrainState) -> Iterator[Copies]:
        yield from super().copies(state)
        if self._size > 1:
            stacked = jax.tree.map(lambda leaf: None if leaf.sharding.is_fully_replicated else leaf, state)
            for devices in self.mesh.devices:
                yield Copies(stacked, self.mesh, P(GROUP), [*devices])

    # The step

    def check(self, parts: Sequence["Part"], opt_state: Any) -> None:
        """Raise `InputError` if an average of parameters contradicts a part or the optimizer."""
        advice = "leave one of them out"
        if is_schedule_free(opt_state):
            problem = ": a schedule-free optimizer averages its parameters itself"
            raise InputError(Key("train.sync_every"), problem, advice=advice)
        if self.outer.momentum is not None and any(isinstance(part, Lookahead) for part in parts):
            problem = ": ", Key("train.lookahead"), " returns to slow weights, which the outer momentum does not move"
            raise InputError(Key.plain("train.outer_optimizer", "nesterov"), problem, advice=advice)

    def check_own_loop(self) -> None:
        raise InputError(Key("train.sync_every"), ": a loop of your own has no groups", advice="leave it out")

    def one_step(self, phases: Phases) -> TrainStep:
        """Return a group's step, with results that vary over the groups, as its arguments do."""
        group_step = super().one_step(replace(phases, shares=self._size))

        def step(state: TrainState, *arguments: Any) -> tuple[TrainState, Any]:
            after, sums = group_step(state, *arguments)
            # The guard selects the step's number, too, by a condition of the group, but the number does not depend on
            # it.
            return varying(after, GROUP).replace(step=state.step + 1), varying(sums, GROUP)

        return step

    def on_devices(self, one_step: TrainStep, feed: tuple[P, ...]) -> TrainStep:
        """Return a function of a stacked state. It returns the sums of each group, [groups, …]."""
        feed_specs = [P((GROUP, AXIS)) if spec == P(AXIS) else spec for spec in feed]

        def local(state: TrainState, *arguments: Any) -> tuple[TrainState, Any]:
            own = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[1:]), state.replace(step=()))
            after, sums = one_step(own.replace(step=state.step), *arguments)
            stacked, sums = jax.tree.map(lambda leaf: leaf[None], (after.replace(step=()), sums))
            return stacked.replace(step=after.step), sums

        def run(state: TrainState, *arguments: Any) -> tuple[TrainState, Any]:
            shared, own = state.parts[DEVICE_GROUPS], without_shared(state)
            specs = self.specs(own)
            out_specs = specs, P(GROUP)
            on_groups = jax.shard_map(local, mesh=self.mesh, in_specs=(specs, *feed_specs, P()), out_specs=out_specs)
            after, sums = on_groups(own, *arguments)
            return after.replace(parts={**after.parts, DEVICE_GROUPS: shared}), sums

        return run

    def gradient(self, objective: TrainObjective) -> Callable[[TrainState, Batch], Any]:
        """Return the average gradient over all devices, at a state that is not stacked."""
        return Way(self.topology, self.gradients).gradient(objective)

    # The meeting

    def meet(self, state: TrainState) -> TrainState:
        """Average the trained parameters and the model's state, and pass the average to the outer optimizer.

        Frozen parameters, the inner optimizer's state and the arrays of parts do not change.
        """
        params, model_state, shared = self._meeting(*_changed_by_meeting(state))
        return state.replace(params=params, model_state=model_state, parts={**state.parts, DEVICE_GROUPS: shared})

    def prepare_meeting(self, state: TrainState) -> Any:
        # JAX keeps the executable for the call.
        return self._meeting.lower(*_changed_by_meeting(state)).compile()

    @functools.cached_property
    def _meeting(self) -> Any:
        shardings = self._sharding(GROUP), self._sharding(GROUP), self._sharding()
        return jax.jit(self._move_to_average, donate_argnums=(0, 1, 2), out_shardings=shardings)

    def _move_to_average(self, params: Any, model_state: Any, shared: Any) -> tuple[Any, Any, Any]:
        mean, mean_state = self.mean((without_frozen(params, self.gradients.frozen), model_state))
        shared, mean = self.outer.update(shared, mean)
        mean, mean_state = self._repeated((mean, mean_state))
        settled = with_frozen_state(model_state, mean_state, self.gradients.settled, params)
        return with_frozen(mean, params), settled, shared

    def jit_between(self, update: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Compile a function of the arrays of each group, and of values that all groups share."""
        return jax.jit(jax.vmap(update, in_axes=(0, None)), out_shardings=self._sharding(GROUP))

    def fetch(self, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
        """Return arrays [groups, …] on the host. All processes call it together.

        The arrays are exchanged by one program, so the groups wait for each other only once.
        """
        if self.topology.peers.is_alone:
            return jax.device_get(list(arrays))
        # Few numbers of arrays mean few programs to compile.
        more = (1 << (len(arrays) - 1).bit_length()) - len(arrays)
        return jax.device_get(self._gather([*arrays, *[arrays[-1]] * more]))[: len(arrays)]

    @functools.cached_property
    def _gather(self) -> Callable[[list[jax.Array]], list[jax.Array]]:
        return jax.jit(lambda arrays: arrays, out_shardings=self._sharding())

    def connect(self) -> None:
        """Run the first collectives: over all processes, between the groups, and within each group."""
        super().connect()
        if self.topology.peers.is_alone:
            return
        ones = self.topology.place(np.ones(len(self.topology.mesh.local_devices), np.float32))
        for axis, other in ((GROUP, AXIS), (AXIS, GROUP)):
            total = functools.partial(lax.psum, axis_name=axis)
            on_groups = jax.shard_map(total, mesh=self.mesh, in_specs=P((GROUP, AXIS)), out_specs=P(other))
            jax.block_until_ready(jax.jit(on_groups)(ones))


def _changed_by_meeting(state: TrainState) -> tuple[Any, Any, Any]:
    return state.params, state.model_state, state.parts[DEVICE_GROUPS]
