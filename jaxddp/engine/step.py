"""The data-parallel step: every device holds a replica, computes on its slice of the batch, and gradients are averaged.

`shard_map`'s replication checker proves, when the step is traced, that its results are the same on every device.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxddp.data.batch import Batch
from jaxddp.engine.extra_arguments import updated
from jaxddp.engine.gradients import Gradients
from jaxddp.engine.parts.iterate_average import multiplied
from jaxddp.engine.parts.part import Part
from jaxddp.engine.set_metrics import over_devices
from jaxddp.engine.state import TrainState, all_finite, in_dtypes_of, kept_types
from jaxddp.engine.step_objective import MetricSums, Objective, TrainObjective
from jaxddp.measure.cost import Cost, compile_with_cost
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.frozen import trained, whole

TrainStep = Callable[..., tuple[TrainState, MetricSums]]
"""(state, batch, random key of the run, by default of seed 0) -> the next state and the sums of this step."""
EvalStep = Callable[..., MetricSums]
"""(state, batch) -> the sums over the batch."""

_DROPOUT = 0x64726F
_AT_ONCE = Gradients()


def make_train_step(
    local_step: Callable[..., Any],
    topology: Topology,
    feed: tuple[P, ...] = (P(AXIS),),
    *,
    compiler_options: Mapping[str, str] | None = None,
) -> TrainStep:
    """Compile (on first use) an optimizer step of `make_local_step` over the global batch.

    The result takes a replicated state, which it consumes (its memory is donated), a batch placed by `topology.place`,
    and the run's key. It returns the new state and the step's sums over the global batch.

    Args:
        feed: the shardings of the arguments between state and key.
    """
    sharded = jax.shard_map(local_step, mesh=topology.mesh, in_specs=(P(), *feed, P()), out_specs=P())

    @functools.wraps(local_step)
    def step(*arguments: Any) -> tuple[TrainState, MetricSums]:
        # The key may be left out.
        return sharded(*arguments, *[None] * (len(feed) + 2 - len(arguments)))

    return jax.jit(step, donate_argnums=0, compiler_options=dict(compiler_options or {}))


def make_local_step(
    objective: TrainObjective,
    optimizer: optax.GradientTransformation,
    topology: Topology,
    *,
    schedule: optax.Schedule | None = None,
    parts: Sequence[Part] = (),
    gradients: Gradients = _AT_ONCE,
) -> TrainStep:
    """Return the optimizer step of one device on its slice of the batch. Call it inside `jax.shard_map`.

    Args:
        schedule: a function of the step, which starts at 0, that returns a factor for the updates of an optimizer
            without a schedule.
        parts: optional parts of the step, called in this order; their arrays are in the state.
        gradients: how the gradient of the batch is computed on the devices.

    Raises:
        InputError: when the step is traced, if the optimizer, the model or a part changes the names, shapes or dtypes
            of the state.
    """

    def local_step(state: TrainState, batch: Batch, key: jax.Array | None = None) -> tuple[TrainState, MetricSums]:
        # The key is an argument and not a constant, so that runs with different seeds share one program.
        run_key = jax.random.key(0) if key is None else key
        dropout = jax.random.fold_in(jax.random.fold_in(run_key, _DROPOUT), state.step)
        # The value is None for a part without arrays in the state.
        arrays = {part.name: state.parts.get(part.name) for part in parts}
        scale = math.prod(part.loss_scale(arrays[part.name]) for part in parts)
        averaged, model_state, means, undivided = gradients.of_batch(
            objective, state, batch, dropout, train=True, image_key=run_key, scale=scale
        )
        grads = averaged
        for part in parts:
            grads = part.gradients(arrays[part.name], grads)
        params = gradients.averaging.parameters(state.params)
        moving = trained(params, gradients.frozen)
        updates, opt_state = updated(optimizer, grads, state.opt_state, moving, value=means.first, grad=averaged)
        rates = [] if schedule is None else [schedule(state.step)]
        rates += [rate for part in parts if (rate := part.rate_factor(arrays[part.name])) is not None]
        if rates:
            rate = functools.reduce(jnp.multiply, rates)
            updates, opt_state = multiplied(updates, state.opt_state, opt_state, lambda path: rate)
        params = whole(optax.apply_updates(moving, updates), params)
        model_state = in_dtypes_of(state.model_state, model_state)
        updated_state = state.replace(step=state.step + 1, params=params, model_state=model_state, opt_state=opt_state)
        new = kept_types(state, updated_state)
        sums = means.replace(values=means.values * gradients.shares(topology))
        for part in parts:
            following, new = part.update(arrays[part.name], state, new, grads)
            if part.judges:
                following, new = part.judge(following, state, new, all_finite(undivided))
            if part.name in state.parts:
                new = new.replace(parts={**new.parts, part.name: following})
            new = kept_types(state, new, f"the part {part.name!r}")
            sums = sums.with_scalars(part.report(following, averaged))
        return new, sums

    return local_step


class Program:
    """A jitted program of one or several steps, compiled on first use for each set of argument shapes.

    Args:
        function: a jitted function of the state and a feed (the arguments after the state).
        steps_in: a function of the feed that returns its number of steps.

    Attributes:
        cost: the cost of one step for the feed of the last call or preparation; None before the first.
    """

    def __init__(self, function: Any, steps_in: Callable[..., int] = lambda *feed: 1):
        self.function, self._steps_in = function, steps_in
        self._compiled: dict[Any, tuple[Any, Cost]] = {}
        self.cost: Cost | None = None

    def __call__(self, state: TrainState, *feed: Any) -> tuple[TrainState, MetricSums]:
        return self.prepare(state, *feed)(state, *feed)

    def check(self, state: TrainState, *feed: Any) -> None:
        """Trace the program for a feed; compiling does not trace again. Raises: see `make_local_step`."""
        self.function.eval_shape(state, *feed)

    def prepare(self, state: TrainState, *feed: Any) -> Any:
        """Return the executable for a feed, compiling it on first use. The feed may consist of shapes alone."""
        if not self.is_ready(*feed):
            return self._compile(state, *feed)
        compiled, self.cost = self._compiled[_shapes_of(feed)]
        return compiled

    def is_ready(self, *feed: Any) -> bool:
        """Tell whether the executable for a feed is compiled."""
        return _shapes_of(feed) in self._compiled

    def _compile(self, state: TrainState, *feed: Any) -> Any:
        compiled, cost = compile_with_cost(self.function, state, *feed)
        self.cost = cost.per_step(self._steps_in(*feed))
        self._compiled[_shapes_of(feed)] = compiled, self.cost
        return compiled


def _shapes_of(feed: Any) -> Any:
    """Return the cache key of a feed: its structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(feed)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def make_eval_step(
    local_step: Callable[..., MetricSums], topology: Topology, feed: tuple[P, ...] = (P(AXIS),)
) -> EvalStep:
    """Compile (on first use) an evaluation step of `make_local_eval_step`. See `make_train_step` for `feed`.

    The result takes a replicated state and a placed batch, and returns sums over the unmasked examples of all devices.
    """
    return jax.jit(jax.shard_map(local_step, mesh=topology.mesh, in_specs=(P(), *feed), out_specs=P()))


def make_local_eval_step(objective: Objective) -> EvalStep:
    """Return the evaluation step of one device on its slice of the batch. Call it inside `jax.shard_map`."""

    def local_step(state: TrainState, batch: Batch) -> MetricSums:
        sums, _ = objective(state.eval_params, state.model_state, batch, train=False)
        return sums.replace(values=lax.psum(sums.values, AXIS), sets=over_devices(sums.sets))

    return local_step


def make_predict(objective: Objective, topology: Topology) -> Callable[[TrainState, Batch], jax.Array]:
    """Compile (on first use) the computation of one batch's logits, float[B, K], sharded like the batch."""

    def local_predict(state: TrainState, batch: Batch) -> jax.Array:
        images = objective.preprocess(batch, train=False).images
        return objective.predict(state.eval_params, state.model_state, images)

    return jax.jit(jax.shard_map(local_predict, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS)))


def make_classify(objective: Objective, topology: Topology) -> Callable[[TrainState, Batch], tuple[jax.Array, Any]]:
    """Compile (on first use) the classification of one batch, replicated.

    The compiled function returns the probabilities of the classes, float32[B, K], and the batch's `substituted`.
    Probabilities are NaN for an image with a logit that is not finite. They are a sigmoid of each logit if images may
    have several labels, and a softmax otherwise.
    """
    predict = make_predict(objective, topology)
    probabilities_of = jax.nn.sigmoid if objective.loss.labels.several else jax.nn.softmax

    def classify(state: TrainState, batch: Batch) -> tuple[jax.Array, Any]:
        logits = predict(state, batch).astype(jnp.float32)
        # XLA may compute any probabilities from logits that are not finite.
        finite = jnp.isfinite(logits).all(-1, keepdims=True)
        return jnp.where(finite, probabilities_of(logits), jnp.nan), batch.substituted

    return jax.jit(classify, out_shardings=topology.replicated)
