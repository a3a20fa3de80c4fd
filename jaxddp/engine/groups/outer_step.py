"""The outer step, which averages the parameters of groups of devices, and the other programs between two steps.

The outer step is a program of its own. A condition in the program of the steps would need all parameters of all groups
at each step to be ready for a collective, and the host would wait for it (see BUILD_NOTES.md, decision 6).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxddp.core.errors import InputError, Key
from jaxddp.engine.gradients import Gradients
from jaxddp.engine.groups.group_mesh import GroupMesh, without_outer_state
from jaxddp.engine.optimizer import is_schedule_free
from jaxddp.engine.parts.averages import Lookahead
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import DEVICE_GROUPS, NUMBERS, TrainState
from jaxddp.mesh import AXIS, GROUP
from jaxddp.models.variables import with_frozen, with_frozen_state, without_frozen

Between = Callable[[TrainState], TrainState]
"""A function of the state that is called between two steps."""


def make_stack(groups: GroupMesh, gradients: Gradients) -> Between:
    """Compile (on first use) a function that gives every group the same state. It frees the memory of its argument."""

    def divide(state: TrainState) -> tuple[TrainState, Any, jax.Array]:
        after = stack(groups, gradients, state)
        return without_outer_state(after).replace(step=()), after.parts[DEVICE_GROUPS], after.step

    program = jax.jit(divide, out_shardings=(groups.stacked, groups.replicated, groups.replicated))

    def stacked(state: TrainState) -> TrainState:
        after, shared, step = jax.block_until_ready(program(state))
        # The step's number may share its memory with the result.
        for leaf in jax.tree.leaves(state.replace(step=())):
            leaf.delete()
        return after.replace(step=step, parts={**after.parts, DEVICE_GROUPS: shared})

    return stacked


def stack(groups: GroupMesh, gradients: Gradients, state: TrainState) -> TrainState:
    """Return a state with the same state for every group, and with the initial arrays of the outer optimizer."""
    after = groups.stack(state.replace(step=()))
    numbers = jnp.arange(groups.count, dtype=jnp.int32)
    shared = {NUMBERS: numbers, **groups.outer.init(without_frozen(state.params, gradients.frozen))}
    return after.replace(step=state.step, parts={**after.parts, DEVICE_GROUPS: shared})


class OuterStep:
    """The outer step of stacked states of the same types, compiled once. The memory of the state is donated.

    It averages the trained parameters and the model's state over the groups, and passes the average of the parameters
    to the outer optimizer. Frozen parameters, the inner optimizer's state and the arrays of parts do not change.
    """

    def __init__(self, groups: GroupMesh, gradients: Gradients):
        self._groups, self._gradients = groups, gradients
        shardings = groups.stacked, groups.stacked, groups.replicated
        self._function = jax.jit(self._average, donate_argnums=(0, 1, 2), out_shardings=shardings)
        self._compiled: Any = None

    def __call__(self, state: TrainState) -> TrainState:
        params, model_state, shared = self.prepare(state)(*_averaged(state))
        return state.replace(params=params, model_state=model_state, parts={**state.parts, DEVICE_GROUPS: shared})

    def prepare(self, state: TrainState) -> Any:
        """Return the executable, which is compiled on first use."""
        if self._compiled is None:
            self._compiled = self._function.lower(*_averaged(state)).compile()
        return self._compiled

    def _average(self, params: Any, model_state: Any, shared: Any) -> tuple[Any, Any, Any]:
        groups, gradients = self._groups, self._gradients
        trained = without_frozen(params, gradients.frozen)
        mean, mean_state = mean_over_groups((trained, model_state), groups, ravels=gradients.averaging.ravels)
        shared, mean = groups.outer.update(shared, mean)
        mean, mean_state = groups.stack((mean, mean_state))
        return with_frozen(mean, params), with_frozen_state(model_state, mean_state, gradients.settled), shared


def _averaged(state: TrainState) -> tuple[Any, Any, Any]:
    return state.params, state.model_state, state.parts[DEVICE_GROUPS]


def make_mean_state(groups: GroupMesh, gradients: Gradients, *, opt_state: bool) -> Between:
    """Compile (on first use) the average of the groups' states, on every device.

    Args:
        opt_state: whether to average the optimizer's state, too. Otherwise it is left out, which saves communication.
    """
    out_shardings = groups.topology.replicated
    mean = jax.jit(
        lambda arrays: mean_over_groups(arrays, groups, ravels=gradients.averaging.ravels), out_shardings=out_shardings
    )

    def mean_state(state: TrainState) -> TrainState:
        if state.groups is None:
            return state
        arrays = without_outer_state(state) if opt_state else without_outer_state(state).replace(opt_state=())
        return mean(arrays.replace(step=())).replace(step=jax.device_put(state.step, out_shardings))

    return mean_state


def check_groups(groups: GroupMesh, parts: Sequence[Part], opt_state: Any) -> None:
    """Raise `InputError` if an average of parameters contradicts the optimizer, whose state is given, or a part."""
    subject = Key("train.sync_every")
    if is_schedule_free(opt_state):
        conflict = ": a schedule-free optimizer computes its parameters from two sequences, which it averages itself"
        raise InputError(subject, conflict, advice="leave one of them out")
    if groups.outer.momentum is not None and any(isinstance(part, Lookahead) for part in parts):
        conflict = (": ", Key("train.lookahead"), " returns to slow weights, which the outer momentum does not move")
        raise InputError(Key.plain("train.outer_optimizer", "nesterov"), conflict, advice="leave one of them out")


def mean_of_saved(state: TrainState, sharding: Sharding) -> TrainState:
    """Return the average of the groups' states of a checkpoint, whose arrays are whole on every device."""
    arrays = without_outer_state(state).replace(step=())
    return jax.jit(lambda arrays: jax.tree.map(_combine, arrays), out_shardings=sharding)(arrays).replace(
        step=state.step
    )


def mean_over_groups(arrays: Any, groups: GroupMesh, *, ravels: bool) -> Any:
    """Return the means of floats over the groups, and the largest of other numbers. Call it inside `jax.jit`.

    Each device averages a slice with the devices of the same place in other groups. The devices of a group then gather
    the slices. So all slices together pass between the groups once.

    Args:
        arrays: arrays [groups, …], divided among the groups.
        ravels: whether arrays of the same dtype are sent as one array.
    """
    leaves, structure = jax.tree.flatten(arrays)
    rows = [leaf.reshape(groups.count, -1) for leaf in leaves]
    buckets: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        buckets.setdefault(row.dtype if ravels else index, []).append(index)
    means: dict[int, jax.Array] = {}
    for bucket in buckets.values():
        mean = _mean_in_slices(jnp.concatenate([rows[index] for index in bucket], axis=1), groups)
        ends = [sum(rows[each].shape[1] for each in bucket[: at + 1]) for at in range(len(bucket))]
        means |= zip(bucket, jnp.split(mean, ends[:-1]), strict=True)
    return jax.tree.unflatten(structure, [means[index].reshape(leaf.shape[1:]) for index, leaf in enumerate(leaves)])


def _mean_in_slices(rows: jax.Array, groups: GroupMesh) -> jax.Array:
    """Return the mean of [groups, values] over the groups: [values]."""
    length = rows.shape[1]
    if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
        return rows[0]
    rows = jnp.pad(rows, ((0, 0), (0, -length % groups.size)))
    place = lambda array, spec: lax.with_sharding_constraint(array, NamedSharding(groups.mesh, spec))  # noqa: E731
    mean = place(_combine(place(rows, P(GROUP, AXIS))), P(AXIS))
    return place(mean, P())[:length]


def _combine(leaf: jax.Array) -> jax.Array:
    """Combine an array [groups, …] over the groups: the mean of floats, the first random key, the largest number."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf[0]
    return leaf.mean(0) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf.max(0)
