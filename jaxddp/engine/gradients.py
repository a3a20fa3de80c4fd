"""Compute the gradient of the global batch. Each device differentiates its slice, and the gradients are averaged.

A slice is computed in equal parts (microbatches), one after the other, so that only one part's activations are in
memory. On CPUs XLA's convolutions are slow inside loops (https://github.com/jax-ml/jax/issues/12868). So on CPUs the
loop over the parts is unrolled, and the program grows with the number of parts.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxddp.config.layers import NO_LAYERS, Layers
from jaxddp.data.batch import Batch
from jaxddp.engine.buckets import AVERAGING, Averaging, is_float
from jaxddp.engine.objective import MetricSums, TrainObjective
from jaxddp.engine.state import TrainState, merged
from jaxddp.mesh import Topology, device_axes, varying
from jaxddp.models.variables import with_frozen, with_frozen_state, without_frozen
from jaxddp.platforms import platform_named

if TYPE_CHECKING:
    from jaxddp.config import Config

Carry = TypeVar("Carry")
StepLoss = Callable[..., tuple[jax.Array, tuple[MetricSums, Any]]]
"""(params, model_state, batch, key) -> (sum of the losses, (sums of the metrics, next model state)). The batch is a
slice of the global batch, and the key is random."""


class Contribution(NamedTuple):
    """The results for one slice of the global batch."""

    grads: Any
    """The gradient of the sum of the slice's losses."""
    model_state: Any
    sums: MetricSums
    undivided: Any = None
    """Arrays with all gradients before `Gradients.of_batch` divides them by the weight. The check for finite values
    reads these arrays, because the division does not change the result of the check. A check of the divided gradients
    would be slower, because XLA writes an array to memory if two operations use it."""


@dataclass(frozen=True)
class Gradients:
    """The settings and functions that compute the gradient.

    The division into microbatches changes results only if the network combines images, as batch norm does.

    Attributes:
        averaging: the average over the devices.
        accumulate: the number of microbatches into which a device divides its slice. Local batch norm normalizes each
            microbatch separately. Running statistics take the mean over microbatches and devices.
        for_cpu: whether XLA's CPU compiler compiles the program; see `scan_parts`.
        frozen: layers whose parameters are not trained. The gradients of these parameters are None.
        settled: layers whose model state does not change.
    """

    averaging: Averaging = field(default_factory=Averaging)
    accumulate: int = 1
    for_cpu: bool = False
    frozen: Layers = NO_LAYERS
    settled: Layers = NO_LAYERS

    @classmethod
    def of(cls, config: "Config", topology: Topology) -> Self:
        """Create `Gradients` from a config, for devices that average every gradient."""
        return cls(
            averaging=Averaging.of(config, topology),
            accumulate=config.train.accumulate,
            for_cpu=platform_named(topology.platform).uses_cpu_compiler,
            frozen=config.frozen,
            settled=config.frozen_norms,
        )

    def of_batch(
        self, objective: TrainObjective, state: TrainState, batch: Batch, key: Any, device: Any = None, **words: Any
    ) -> Contribution:
        """Compute the gradient of the mean loss over all unmasked examples of the global batch.

        Call it inside `jax.shard_map`. The returned model state and sums are means over the shares.

        Args:
            state: the state whose parameters and model state are used.
            batch: this device's slice.
            key: the random key of the step. Each share folds its number into the key.
            device: the number of the device in the mesh, int32[], if its sums over its slice are returned, without
                communication, for `combine`.
            words: `train`, `image_key` and `scale`, a factor of the loss for differentiation. The gradient is divided
                by the same factor.
        """
        loss, params = self._minimized(objective, state, **words)
        if device is not None:
            return self.share(loss, params, state.model_state, batch, jax.random.fold_in(key, device))[0]
        return self._divided(state, self.mean(loss, params, state.model_state, batch, key), words.get("scale", 1))

    def combine(self, state: TrainState, contribution: Contribution, scale: Any) -> Contribution:
        """Average the sums of `of_batch` over the devices; return a result like that of `of_batch`."""
        order = range(len(jax.tree.leaves(contribution.grads)))
        return self._divided(state, self._average(contribution, order), scale)

    def _minimized(
        self, objective: TrainObjective, state: TrainState, *, train: bool, image_key: Any = None, scale: Any = 1
    ) -> tuple[StepLoss, Any]:
        """Return the sum of the losses as a function of the trained parameters, and these parameters."""
        # With replicated parameters, JAX would sum the gradient over the devices. The cast prevents the sum.
        all_params = varying(state.params)

        def total_loss(params: Any, model_state: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, Any]:
            params = with_frozen(params, all_params)
            sums, model_state = objective(params, model_state, batch, train=train, key=key, image_key=image_key)
            return sums.values[0, 0] * scale, (sums, model_state)

        return total_loss, without_frozen(all_params, self.frozen)

    def _divided(self, state: TrainState, averaged: Contribution, scale: Any) -> Contribution:
        """Divide the averaged gradients by the averaged weight."""
        grads, model_state, means, arrays = averaged
        arrays = grads if arrays is None else arrays
        model_state = with_frozen_state(state.model_state, model_state, self.settled)
        # `grads` is the average over shares of a sum over examples. Its quotient by the average weight is the mean over
        # all unmasked examples, for any distribution of the examples over the devices. The divisor is at least the
        # smallest normal number, because XLA treats smaller numbers as 0.
        weight = jnp.maximum(means.values[0, 1] * scale, jnp.finfo(means.values.dtype).tiny)
        return Contribution(jax.tree.map(lambda g: g / weight.astype(g.dtype), grads), model_state, means, arrays)

    def _average(self, contribution: Contribution, order: Sequence[int]) -> Contribution:
        grads, *other_results, _ = contribution
        with jax.named_scope(AVERAGING):
            grads, (model_state, sums), arrays = self.averaging.average(grads, other_results, order)
        return Contribution(grads, model_state, sums, arrays)

    def mean(self, loss: StepLoss, params: Any, model_state: Any, batch: Batch, key: jax.Array) -> Contribution:
        """Average the gradients and the other results over the shares of the global batch.

        Call it inside `jax.shard_map`, with varying `params`. Each share folds its number into the step's key.
        """
        device_key = jax.random.fold_in(key, lax.axis_index(device_axes()))
        return self._average(*self.share(loss, params, model_state, batch, device_key))

    def share(
        self, loss: StepLoss, params: Any, model_state: Any, batch: Batch, key: jax.Array
    ) -> tuple[Contribution, Sequence[int]]:
        """Differentiate one share. Also return an order of the gradients; see `Averaging.differentiate`."""
        averaging = self.averaging
        if self.accumulate > 1:
            params, averaging = averaging.gathered(params)

        def differentiate(part: Batch, key: jax.Array) -> tuple[Contribution, Sequence[int]]:
            part_loss = functools.partial(loss, model_state=model_state, batch=part, key=key)
            grads, (sums, state), order = averaging.differentiate(part_loss, params)
            return Contribution(grads, state, sums), order

        if self.accumulate == 1:
            return differentiate(batch, key)

        def add(total: Any, part: Batch, number: jax.Array) -> tuple[Any, tuple[Any, MetricSums]]:
            (grads, state, sums, _), _ = differentiate(part, jax.random.fold_in(key, number))
            return jax.tree.map(jnp.add, total, grads), (state, sums)

        zeros = varying(jax.tree.map(jnp.zeros_like, params))
        grads, (states, sums) = scan_parts(add, zeros, batch, self.accumulate, self.for_cpu)
        share = Contribution(grads, jax.tree.map(merged, states), jax.tree.map(lambda values: values.sum(0), sums))
        return share, range(len(jax.tree.leaves(grads)))


def scan_parts(
    body: Callable[[Carry, Batch, jax.Array], tuple[Carry, Any]], carry: Carry, batch: Batch, count: int, unrolled: bool
) -> tuple[Carry, Any]:
    """Call `body(carry, part, number)` for `count` equal parts of a batch; see `scan_range`."""
    parts = jax.tree.map(lambda column: column.reshape(count, -1, *column.shape[1:]), batch)

    def part_body(carry: Carry, number: jax.Array | int) -> tuple[Carry, Any]:
        part = jax.tree.map(lambda column: lax.dynamic_index_in_dim(column, number, keepdims=False), parts)
        return body(carry, part, jnp.asarray(number))

    return scan_range(part_body, carry, count, unrolled=unrolled)


def scan_range(
    body: Callable[[Carry, jax.Array | int], tuple[Carry, Any]], carry: Carry, count: int, *, unrolled: bool = False
) -> tuple[Carry, Any]:
    """Call `body(carry, number)` for the numbers 0 to `count` - 1; return the last carry and the stacked results.

    The loop is `lax.scan`. A single call, or a loop that is `unrolled`, has no `lax.scan`.
    """
    if count == 1:
        carry, result = body(carry, 0)
        return carry, jax.tree.map(lambda values: values[None], result)
    if not unrolled:
        return lax.scan(body, carry, jnp.arange(count))
    results: list[Any] = []
    for number in range(count):
        carry, result = body(carry, number + zero_after((carry, results[-1:])))
        results.append(result)
    return carry, jax.tree.map(lambda *columns: jnp.stack(columns), *results)


def zero_after(tree: Any) -> jax.Array:
    """Return a 0, int32[], that depends on a tree. XLA computes the tree before operations that use this 0.

    XLA's CPU compiler removes barriers, and orders operations only by the use of their results. Without this 0 it would
    compute all forward passes first and keep the activations of all parts in memory.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf) and leaf.size]
    return functools.reduce(jnp.add, [(leaf.ravel()[0] > jnp.inf).astype(jnp.int32) for leaf in leaves], jnp.int32(0))
