"""Batch statistics of averaged parameters, from forward passes over training batches.

The statistics of the trained parameters do not fit an average of parameters (Izmailov et al. 2018, "Averaging weights
leads to wider optima", arXiv:1803.05407, section 3.2).
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.core.phases import moved
from jaxddp.engine.programs import Program
from jaxddp.engine.state import DEVICE_GROUPS, EVAL_MODEL_STATE, EVAL_PARAMS, MEASURED_AT, TrainState, all_finite
from jaxddp.engine.ways.way import Way

PASSES = 100
"""The largest number of passes: with batches of 128 images, the relative error of a variance is about 1%."""
STILL = optax.set_to_zero()
"""The optimizer of the passes. It ignores the gradients, so XLA computes none."""
_MOST_KEPT, _TOLERANCE = 0.9999, 1e-2
Update = Callable[[Any, Any], Any]


def with_own_statistics(
    state: TrainState, way: Way, program: Program, chunks: Callable[[], Iterable[Any]]
) -> TrainState:
    """Return a state whose evaluation parameters have batch statistics of their own; see `mean_statistics`.

    Args:
        program: the program of a training step with the optimizer `STILL` and without parts.
        chunks: returns the `jaxddp.training.run.Chunk`s of the passes, each of one step.
    """
    (name,) = (name for name, arrays in state.parts.items() if EVAL_MODEL_STATE in arrays)
    own, start = state.parts[name], state.model_state
    shared = {key: arrays for key, arrays in state.parts.items() if key == DEVICE_GROUPS}
    # A program consumes its state, so all arrays are copied. The mean of stacked states is evaluated. A sharded
    # optimizer divides averages of frozen parameters, too.
    step, shared = _copied((state.step, shared))
    copy = (lambda leaf: jnp.broadcast_to(leaf.mean(0), leaf.shape)) if state.stacked else jnp.copy
    placed = jax.jit(lambda tree: jax.tree.map(copy, tree), out_shardings=way.shardings(state).params)
    probe = TrainState(step, placed(own[EVAL_PARAMS]), start, STILL.init({}), shared)

    def updated(model_state: Any, chunk: Any) -> Any:
        nonlocal probe
        probe, _ = program(probe.replace(step=_copied(state.step), model_state=model_state), *chunk.feed)
        return probe.model_state

    solve, place = way.jit_between(_solved), way.topology.replicate
    means = mean_statistics(start, updated, chunks(), lambda arrays, count: solve(arrays, place(count)))
    own = {**own, EVAL_MODEL_STATE: means}
    own[MEASURED_AT] = way.jit_between(jnp.full_like)(own[MEASURED_AT], state.step)
    return state.replace(parts={**state.parts, name: own})


def mean_statistics(start: Any, update: Update, batches: Iterable[Any], solve: Update | None = None) -> Any:
    """Return the mean of the statistics of batches, for the network that updates statistics.

    A network updates them as kept * old + (1 - kept) * (those of the batch), where `kept` is known to the network
    alone. Each update begins with the same statistics, and one also with twice as large ones: the difference of its
    results is kept * old. So the mean of the batches' statistics follows from the mean of the results, for any network.
    Arrays with another rule, and frozen ones, keep the values of `start`. Statistics of a batch that are not finite
    are left out.

    Args:
        update: a function of the statistics, which it may consume, and of a batch, which returns the next statistics.
        solve: compiles `_solved` for the places of the arrays.
    """
    # Without a finite batch, the result is `start`.
    results, total, count = [start, start], start, 0
    for batch in batches:
        moved()
        found = update(_copied(start), batch)
        if all_finite(found):
            results = results if count else [update(_doubled(start, found), batch), found]
            total = _added(total, found) if count else found
            count += 1
    return (solve or jax.jit(_solved))({"start": start, "results": results, "total": total}, float(count))


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


@jax.jit
def _doubled(tree: Any, after: Any) -> Any:
    """Return twice the floats that differ after an update. Others belong to frozen norms, which normalize by them."""

    def doubled(leaf: jax.Array, new: jax.Array) -> jax.Array:
        return leaf * jnp.where((leaf == new).all(), 1, 2).astype(leaf.dtype) if _is_float(leaf) else jnp.copy(leaf)

    return jax.tree.map(doubled, tree, after)


@jax.jit
def _added(tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda one, two: one + two if _is_float(one) else two, tree, other)


def _solved(arrays: Any, count: jax.Array) -> Any:
    """Return the result of `mean_statistics`."""

    def batch_mean(start: jax.Array, twice: jax.Array, once: jax.Array, total: jax.Array) -> jax.Array:
        if not _is_float(start):
            return start
        left, squared = twice - once, jnp.sum(start * start)
        kept = jnp.where(squared > 0, jnp.sum(left * start) / squared, 0)
        is_linear = jnp.sum((left - kept * start) ** 2) <= _TOLERANCE**2 * squared
        mean = (total / count.astype(total.dtype) - kept * start) / (1 - kept)
        is_mean = is_linear & (kept >= -_TOLERANCE) & (kept < _MOST_KEPT) & (once != start).any()
        return jnp.where(is_mean, mean, start).astype(start.dtype)

    return jax.tree.map(batch_mean, arrays["start"], *arrays["results"], arrays["total"])


def _is_float(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
