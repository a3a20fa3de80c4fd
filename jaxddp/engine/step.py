"""The data-parallel step. Every device holds a replica of the state and differentiates its slice of the batch, and the
gradients are averaged.

When the step is traced, `shard_map`'s replication checker verifies that the results are the same on every device.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxddp.data.batch import Batch
from jaxddp.engine.gradients import Gradients
from jaxddp.engine.groups.group_mesh import GroupMesh
from jaxddp.engine.parts.part import Part
from jaxddp.engine.set_metrics import combine_devices
from jaxddp.engine.state import TrainState, all_finite
from jaxddp.engine.step_objective import MetricSums, Objective, TrainObjective
from jaxddp.engine.step_phases import Phases
from jaxddp.measure.cost import Cost, compile_with_cost
from jaxddp.mesh import AXIS, Topology

TrainStep = Callable[..., tuple[TrainState, MetricSums]]
"""(state, batch, the run's random key) -> (next state, sums of this step). Without a key, the key of seed 0 is used."""
EvalStep = Callable[..., MetricSums]
"""(state, batch) -> the sums over the batch."""

_DEFAULT_GRADIENTS = Gradients()


def make_train_step(
    one_step: Callable[..., Any],
    topology: Topology,
    feed: tuple[P, ...] = (P(AXIS),),
    *,
    sharded: bool = False,
    groups: GroupMesh | None = None,
    compiler_options: Mapping[str, str] | None = None,
) -> TrainStep:
    """Compile (on first use) an optimizer step over the global batch.

    The compiled function takes a state, whose memory is donated, a batch placed by `topology.place`, and the run's key.
    It returns the new state and the step's sums over the global batch.

    Args:
        one_step: a step of `make_local_step`, or of `jaxddp.engine.sharded.sharded_step.make_sharded_step`.
        feed: the shardings of the arguments between the state and the key.
        sharded: whether `one_step` is of `make_sharded_step`. If not, the state is replicated.
        groups: groups of devices with a state each; `one_step` is of `GroupMesh.one_step`, and the sums are those of
            each group, [groups, …].
    """
    in_specs = (P(), *feed, P())
    if groups is not None:
        on_devices = groups.on_devices(one_step, feed)
    elif sharded:
        on_devices = one_step
    else:
        on_devices = jax.shard_map(one_step, mesh=topology.mesh, in_specs=in_specs, out_specs=P())

    @functools.wraps(one_step)
    def step(*arguments: Any) -> tuple[TrainState, MetricSums]:
        # The key may be left out.
        return on_devices(*arguments, *[None] * (len(feed) + 2 - len(arguments)))

    return jax.jit(step, donate_argnums=0, compiler_options=dict(compiler_options or {}))


def make_local_step(
    objective: TrainObjective,
    optimizer: optax.GradientTransformation,
    topology: Topology,
    *,
    schedule: optax.Schedule | None = None,
    parts: Sequence[Part] = (),
    gradients: Gradients = _DEFAULT_GRADIENTS,
) -> TrainStep:
    """Return the optimizer step of one device on its slice of the batch. Call it inside `jax.shard_map`.

    Args:
        schedule: a function from the step's number, which starts at 0, to a factor of the updates. It is for optimizers
            without a schedule.
        parts: optional parts of the step, called in this order; their arrays are in the state.
        gradients: the computation of the batch's gradient on the devices.

    Raises:
        InputError: when the step is traced, if the optimizer, the model or a part changes the names, shapes or dtypes
            of the state.
    """
    phases = Phases(objective, optimizer, schedule, parts, gradients, gradients.shares(topology))

    def local_step(state: TrainState, batch: Batch, key: jax.Array | None = None) -> tuple[TrainState, MetricSums]:
        contribution = phases.gradient(state, batch, key)
        return phases.update(state, contribution, lambda: all_finite(contribution.undivided))

    return local_step


class Program:
    """A jitted program of one or several steps, compiled on first use for each set of argument shapes.

    Args:
        function: a jitted function of the state and a feed (the arguments after the state).
        steps_in: a function of the feed that returns its number of steps.

    Attributes:
        cost: the cost of one step for the feed of the last call or preparation; None before the first one.
    """

    def __init__(self, function: Any, steps_in: Callable[..., int] = lambda *feed: 1):
        self.function, self._steps_in = function, steps_in
        self._compiled: dict[Any, tuple[Any, Cost]] = {}
        self.cost: Cost | None = None

    def __call__(self, state: TrainState, *feed: Any) -> tuple[TrainState, MetricSums]:
        return self.prepare(state, *feed)(state, *feed)

    def check(self, state: TrainState, *feed: Any) -> None:
        """Trace the program for a feed. Compilation uses the same trace. Raises: see `make_local_step`."""
        self.function.eval_shape(state, *feed)

    def prepare(self, state: TrainState, *feed: Any) -> Any:
        """Return the executable for a feed, which is compiled on first use. The feed may consist of shapes."""
        if not self.is_ready(*feed):
            return self._compile(state, *feed)
        compiled, self.cost = self._compiled[shapes_of(feed)]
        return compiled

    def is_ready(self, *feed: Any) -> bool:
        """Return whether the executable for a feed is compiled."""
        return shapes_of(feed) in self._compiled

    def _compile(self, state: TrainState, *feed: Any) -> Any:
        compiled, cost = compile_with_cost(self.function, state, *feed)
        self.cost = cost.per_step(self._steps_in(*feed))
        self._compiled[shapes_of(feed)] = compiled, self.cost
        return compiled


def shapes_of(feed: Any) -> Any:
    """Return the cache key of a feed: its structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(feed)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def make_eval_step(
    local_step: Callable[..., MetricSums], topology: Topology, feed: tuple[P, ...] = (P(AXIS),)
) -> EvalStep:
    """Compile (on first use) an evaluation step of `make_local_eval_step`. See `make_train_step` for `feed`.

    The compiled function takes a replicated state and a placed batch. It returns sums over the unmasked examples of all
    devices.
    """
    return jax.jit(jax.shard_map(local_step, mesh=topology.mesh, in_specs=(P(), *feed), out_specs=P()))


def make_local_eval_step(objective: Objective) -> EvalStep:
    """Return the evaluation step of one device on its slice of the batch. Call it inside `jax.shard_map`."""

    def local_step(state: TrainState, batch: Batch) -> MetricSums:
        sums, _ = objective(state.eval_params, state.model_state, batch, train=False)
        return sums.replace(values=lax.psum(sums.values, AXIS), sets=combine_devices(sums.sets))

    return local_step


def make_predict(objective: Objective, topology: Topology) -> Callable[[TrainState, Batch], jax.Array]:
    """Compile (on first use) the computation of one batch's logits, float[B, K], sharded like the batch."""

    def local_predict(state: TrainState, batch: Batch) -> jax.Array:
        images = objective.preprocess(batch, train=False).images
        return objective.predict(state.eval_params, state.model_state, images)

    return jax.jit(jax.shard_map(local_predict, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS)))


def make_classify(objective: Objective, topology: Topology) -> Callable[[TrainState, Batch], tuple[jax.Array, Any]]:
    """Compile (on first use) the classification of one batch, replicated.

    The compiled function returns the probabilities of the classes, float32[B, K], and the batch's `substituted`. If
    images may have several labels, the probabilities are the sigmoid of the logits, and otherwise their softmax. They
    are NaN for an image with a logit that is not finite.
    """
    predict, probabilities_of = make_predict(objective, topology), make_probabilities(objective)

    def classify(state: TrainState, batch: Batch) -> tuple[jax.Array, Any]:
        return probabilities_of(predict(state, batch)), batch.substituted

    return jax.jit(classify, out_shardings=topology.replicated)


def make_probabilities(objective: Objective) -> Callable[[jax.Array], jax.Array]:
    """Return the function from logits to probabilities of classes, float32[B, K]; see `make_classify`."""
    function = jax.nn.sigmoid if objective.loss.labels.several else jax.nn.softmax

    def probabilities(logits: jax.Array) -> jax.Array:
        logits = logits.astype(jnp.float32)
        # XLA may compute any values from logits that are not finite.
        finite = jnp.isfinite(logits).all(-1, keepdims=True)
        return jnp.where(finite, function(logits), jnp.nan)

    return probabilities
