"""The data-parallel step: every device holds a replica, takes its slice of the batch, and all average their gradients.

What leaves the step is the same on every device: `shard_map`'s replication checker proves it when the step is traced.
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
"""(state, batch, key of the run's seed, of seed 0 where there is none) -> the next state and the sums of this step."""
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
    """Compile (on first use) one optimizer step, of `make_local_step`, over the global batch.

    The result takes a replicated state, which it consumes (its memory is donated to the new one), a batch placed by
    `topology.place`, and the run's key; it returns the new state and that step's sums over the global batch.

    Args:
        feed: how the arguments between state and key are sharded.
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
    """One optimizer step as each device takes it, on its slice of the batch: to be called inside `jax.shard_map`.

    Args:
        schedule: multiplies the optimizer's updates, 0 for the first step; for optimizers that have no schedule.
        parts: optional pieces, in this order; their arrays are in the state.
        gradients: how the gradient of the batch is computed on the devices.

    Raises:
        InputError: when it is traced; the optimizer, the model or a part would change what its state consists of.
    """

    def local_step(state: TrainState, batch: Batch, key: jax.Array | None = None) -> tuple[TrainState, MetricSums]:
        # An argument and no constant, so that runs of several seeds are one program.
        run_key = jax.random.key(0) if key is None else key
        dropout = jax.random.fold_in(jax.random.fold_in(run_key, _DROPOUT), state.step)
        # None of a part that has no place in the state.
        own = {part.name: state.parts.get(part.name) for part in parts}
        scale = math.prod(part.loss_scale(own[part.name]) for part in parts)
        averaged, model_state, means, undivided = gradients.of_batch(
            objective, state, batch, dropout, train=True, image_key=run_key, scale=scale
        )
        grads = averaged
        for part in parts:
            grads = part.gradients(own[part.name], grads)
        params = gradients.averaging.parameters(state.params)
        moving = trained(params, gradients.frozen)
        updates, opt_state = updated(optimizer, grads, state.opt_state, moving, value=means.first, grad=averaged)
        rates = [] if schedule is None else [schedule(state.step)]
        rates += [rate for part in parts if (rate := part.rate_factor(own[part.name])) is not None]
        if rates:
            rate = functools.reduce(jnp.multiply, rates)
            updates, opt_state = multiplied(updates, state.opt_state, opt_state, lambda path: rate)
        params = whole(optax.apply_updates(moving, updates), params)
        model_state = in_dtypes_of(state.model_state, model_state)
        made = state.replace(step=state.step + 1, params=params, model_state=model_state, opt_state=opt_state)
        new = kept_types(state, made)
        sums = means.replace(values=means.values * gradients.shares(topology))
        for part in parts:
            following, new = part.update(own[part.name], state, new, grads)
            if part.judges:
                following, new = part.judge(following, state, new, all_finite(undivided))
            if part.name in state.parts:
                new = new.replace(parts={**new.parts, part.name: following})
            new = kept_types(state, new, f"the part {part.name!r}")
            sums = sums.with_scalars(part.report(following, averaged))
        return new, sums

    return local_step


class Program:
    """A jitted step, or several in one, compiled for each feed of other shapes when one is first needed.

    It takes the state, which is donated as `function` does, and what a chunk feeds it with; `steps_in` tells of this
    feed how many steps it is for.

    Attributes:
        cost: of one step of the feed that was taken, or prepared for, last; None before the first.
    """

    def __init__(self, function: Any, steps_in: Callable[..., int] = lambda *feed: 1):
        self.function, self._steps_in = function, steps_in
        self._compiled: dict[Any, tuple[Any, Cost]] = {}
        self.cost: Cost | None = None

    def __call__(self, state: TrainState, *feed: Any) -> tuple[TrainState, MetricSums]:
        return self.prepare(state, *feed)(state, *feed)

    def check(self, state: TrainState, *feed: Any) -> None:
        """Trace what takes a feed of these shapes; to compile it traces no more. Raises: as `make_local_step`."""
        self.function.eval_shape(state, *feed)

    def prepare(self, state: TrainState, *feed: Any) -> Any:
        """What takes a feed of these shapes, compiled unless one was needed before. A feed may be shapes alone."""
        if not self.is_ready(*feed):
            return self._compile(state, *feed)
        compiled, self.cost = self._compiled[_shapes_of(feed)]
        return compiled

    def is_ready(self, *feed: Any) -> bool:
        """Whether what takes a feed of these shapes was compiled."""
        return _shapes_of(feed) in self._compiled

    def _compile(self, state: TrainState, *feed: Any) -> Any:
        compiled, cost = compile_with_cost(self.function, state, *feed)
        self.cost = cost.of_one(self._steps_in(*feed))
        self._compiled[_shapes_of(feed)] = compiled, self.cost
        return compiled


def _shapes_of(feed: Any) -> Any:
    """By which one feed is known from another: its structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(feed)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def make_eval_step(
    local_step: Callable[..., MetricSums], topology: Topology, feed: tuple[P, ...] = (P(AXIS),)
) -> EvalStep:
    """Compile (on first use) the measurement of one batch, of `make_local_eval_step`: sums over its unmasked examples,
    over all devices. `feed` is as in `make_train_step`."""
    return jax.jit(jax.shard_map(local_step, mesh=topology.mesh, in_specs=(P(), *feed), out_specs=P()))


def make_local_eval_step(objective: Objective) -> EvalStep:
    """The measurement of one batch as each device makes it, on its slice: to be called inside `jax.shard_map`."""

    def local_step(state: TrainState, batch: Batch) -> MetricSums:
        sums, _ = objective(state.eval_params, state.model_state, batch, train=False)
        return sums.replace(values=lax.psum(sums.values, AXIS), sets=over_devices(sums.sets))

    return local_step


def make_predict(objective: Objective, topology: Topology) -> Callable[[TrainState, Batch], jax.Array]:
    """Compile (on first use) the logits of one batch, float[B, K], sharded as the batch is."""

    def local_predict(state: TrainState, batch: Batch) -> jax.Array:
        images = objective.preprocess(batch, train=False).images
        return objective.predict(state.eval_params, state.model_state, images)

    return jax.jit(jax.shard_map(local_predict, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS)))


def make_classify(objective: Objective, topology: Topology) -> Callable[[TrainState, Batch], tuple[jax.Array, Any]]:
    """Compile (on first use) the classification of one batch, the same on every device.

    It gives the probabilities of the classes, float32[B, K], NaN where a logit is not finite, and the batch's
    `substituted`. Where the loss is of several labels an image, each class has a probability of its own.
    """
    predict = make_predict(objective, topology)
    probabilities_of = jax.nn.sigmoid if objective.loss.labels.several else jax.nn.softmax

    def classify(state: TrainState, batch: Batch) -> tuple[jax.Array, Any]:
        logits = predict(state, batch).astype(jnp.float32)
        # Of logits that are not finite XLA may make any probabilities.
        finite = jnp.isfinite(logits).all(-1, keepdims=True)
        return jnp.where(finite, probabilities_of(logits), jnp.nan), batch.substituted

    return jax.jit(classify, out_shardings=topology.replicated)
