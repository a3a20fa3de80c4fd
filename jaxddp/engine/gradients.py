"""Compute the gradient of the global batch. Each device differentiates its slice, and the gradients are averaged.

A slice is computed in equal parts (microbatches), one after the other, so that only one part's activations are in
memory. On CPUs XLA's convolutions are slow inside loops (https://github.com/jax-ml/jax/issues/12868). So on CPUs the
loop over the parts is unrolled, and the program grows with the number of parts.

**Buckets.** Gradients are averaged in buckets, so that communication overlaps with the backward pass. XLA computes the
gradients with respect to activations first, and those with respect to kernels in any order. It sends all-reduces in the
order in which their results are used, and fuses operations that read the same array. Four rules make communication
overlap with computation in any network of separate layers (a scan over layers produces all gradients at once):

- A bucket holds gradients that the traced program computes one after the other (`order_of_readiness`).
- Later buckets are smaller, because less computation is left that can overlap with them (`fill_in_order`).
- Each all-reduce waits for the previous one, so the buckets are sent in this order (`Averaging.average`).
- The optimizer reads the parameters behind a barrier (`Averaging.parameters`). Otherwise XLA fuses the update of a
  kernel with the cast of the kernel for an activation's gradient, so the backward pass waits for an all-reduce.

On one GPU nothing is sent, but gradients are ravelled too. A few kernels then check and update what otherwise takes a
kernel for each array.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.flatten_util import ravel_pytree

from jaxddp.config.layers import NO_LAYERS, Layers
from jaxddp.data.batch import Batch
from jaxddp.engine.objective import MetricSums, TrainObjective
from jaxddp.engine.state import TrainState, merged
from jaxddp.mesh import AXIS, Topology, device_axes, varying
from jaxddp.models.interface import cast, with_frozen, with_frozen_state, without_frozen
from jaxddp.platforms import platform_named

if TYPE_CHECKING:
    from jaxddp.config import Config


AVERAGING = "average_gradients"
"""The named scope of the gradients' all-reduces, which appears in profiles and compiled programs."""
_SMALL = 1 << 14
"""The largest number of elements of the gradients that a single device ravels in a loop of steps."""


@dataclass(frozen=True)
class Averaging:
    """The settings and functions that average gradients, and other values with them, over the devices.

    Attributes:
        buckets: the largest number of all-reduces. One all-reduce is fastest if communication cannot overlap with
            computation, as with gloo.
        dtype: the dtype in which gradients are sent; None keeps the gradients' own dtype.
        ravels: whether a bucket is sent as one array, or as a separate operand for each gradient.
        ravels_alone: the largest number of elements of the gradients that a single device ravels.
    """

    buckets: int = 1
    dtype: str | None = None
    ravels: bool = True
    ravels_alone: int = 0

    @classmethod
    def of(cls, config: "Config", topology: Topology) -> "Averaging":
        """Create an `Averaging` from a config. Without `parallel.buckets` the default depends on the platform."""
        platform = platform_named(topology.platform)
        buckets = 1 if topology.num_devices == 1 else config.parallel.buckets or platform.buckets
        # In a loop of steps XLA keeps convolution kernels in the layout of their gradients. Ravelling would change it.
        alone = min(platform.ravels_alone, _SMALL) if config.data.cache == "device" else platform.ravels_alone
        return cls(buckets, config.train.gradient_precision, platform.ravels, alone)

    def gathered(self, params: Any) -> tuple[Any, "Averaging"]:
        """Return whole parameters, and the settings for their gradients. They are already whole."""
        return params, self

    def differentiate(self, loss: Callable[[Any], Any], params: Any) -> tuple[Any, Any, Sequence[int]]:
        """Differentiate `loss`, which returns (loss, aux).

        Returns:
            The gradient, `aux`, and an order of the gradient's leaves. With several buckets, this is the order in which
            the program computes the leaves.
        """
        if self.buckets > 1:
            return differentiate_in_order(loss, params, lambda order: jax.tree.leaves(params))
        grads, aux = jax.grad(loss, has_aux=True)(params)
        return grads, aux, range(len(jax.tree.leaves(grads)))

    def average(self, grads: Any, other_values: Any, order: Sequence[int]) -> tuple[Any, Any, list[jax.Array]]:
        """Average all floating-point leaves over the devices, and take the maximum of all other leaves (counters).

        Args:
            other_values: values that are computed before any gradient, such as batch statistics. They join the first
                bucket.
            order: the order in which the leaves of `grads` are sent.

        Returns:
            The averages of `grads` and of `other_values`, and arrays with all averaged gradients: one for each bucket
            if buckets are ravelled.
        """
        if jax.lax.axis_size(AXIS) == 1:
            return self._alone(grads, other_values)
        leaves, structure = jax.tree.flatten((grads, other_values))
        early = [index for index in range(len(order), len(leaves)) if is_float(leaves[index])]
        buckets = self._arrange(early, leaves, order)
        averaged = {index: jax.lax.pmax(leaf, AXIS) for index, leaf in enumerate(leaves) if not is_float(leaf)}
        previous, gradients = None, []
        for bucket in buckets:
            dtype = None if bucket is early else self.dtype
            means, arrays = self._mean(bucket, [leaves[index] for index in bucket], dtype, previous)
            averaged.update(zip(bucket, means, strict=True))
            if bucket is not early:
                gradients += _after([leaves[index] for index in bucket if index in early], arrays)
            previous = arrays[0]
        return *jax.tree.unflatten(structure, [averaged[index] for index in range(len(leaves))]), gradients

    def _alone(self, grads: Any, other_values: Any) -> tuple[Any, Any, list[jax.Array]]:
        """Return the result of `average` on one device."""
        leaves, structure = jax.tree.flatten((other_values, grads))
        # Sum, mean and maximum are equal, and XLA compiles no collective. Complex numbers have no maximum.
        leaves = [(jax.lax.psum if jnp.iscomplexobj(leaf) else jax.lax.pmax)(leaf, AXIS) for leaf in leaves]
        first = len(jax.tree.leaves(other_values))
        ravelled = [index for index, leaf in enumerate(leaves) if is_float(leaf) and leaf.size <= self.ravels_alone]
        gradients = [leaf for index, leaf in enumerate(leaves[first:], first) if index not in ravelled]
        if ravelled:
            buffer, unravel = ravel_pytree([leaves[index] for index in ravelled])
            # Without the barrier XLA would read the leaves in place of the array.
            buffer = jax.lax.optimization_barrier(buffer)
            for index, leaf in zip(ravelled, unravel(buffer), strict=True):
                leaves[index] = leaf
            gradients.append(buffer[sum(leaves[index].size for index in ravelled if index < first) :])
        other_values, grads = jax.tree.unflatten(structure, leaves)
        return grads, other_values, gradients

    def _arrange(self, early: list[int], leaves: list[jax.Array], order: Sequence[int]) -> list[list[int]]:
        """Return the indices of the leaves of each bucket, in the order in which the buckets are sent."""
        buckets = fill_in_order(leaves, order, self.buckets)
        # Only gradients are cast to `dtype`. So with a `dtype` the other values have their own bucket.
        return [early, *buckets] if self.dtype or not buckets else [early + buckets[0], *buckets[1:]]

    def _mean(
        self, bucket: list[int], leaves: list[jax.Array], dtype: str | None, previous: jax.Array | None
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Average the leaves of a bucket in one all-reduce, which XLA starts after `previous` is computed.

        Args:
            bucket: the indices of the leaves.
            dtype: the dtype in which the leaves are sent; None keeps their own dtype.

        Returns:
            The means of the leaves, and the arrays that were averaged, which contain these means in the same order.
        """
        arrays, unravel = leaves, None
        if self.ravels:
            buffer, unravel = ravel_pytree(leaves)
            arrays = [buffer]
        message = compute_after(cast(arrays, dtype), previous)
        means = jax.lax.pmean(message, AXIS)
        results = [mean.astype(x.dtype) for mean, x in zip(means, arrays, strict=True)]
        return results if unravel is None else unravel(results[0]), means

    def parameters(self, params: Any) -> Any:
        """Return the parameters for the optimizer, behind a barrier if there are several buckets."""
        return params if self.buckets == 1 else jax.lax.optimization_barrier(params)


def fill_in_order(leaves: Sequence[Any], order: Sequence[int], buckets: int) -> list[list[int]]:
    """Divide an order of leaves into at most `buckets` buckets of their indices, without empty buckets.

    Each bucket takes about half of the remaining bytes. The last bucket takes all remaining leaves.
    """
    total, used = sum(leaves[index].nbytes for index in order), 0
    filled: list[list[int]] = [[] for _ in range(buckets)]
    for index in order:
        size = leaves[index].nbytes
        # A leaf belongs to the bucket that contains the middle of the leaf.
        left = 1 - (used + size / 2) / total if total else 0.0
        used += size
        filled[next((i for i in range(buckets - 1) if left >= 0.5 ** (i + 1)), buckets - 1)].append(index)
    return [bucket for bucket in filled if bucket]


def differentiate_in_order(
    loss: Callable[[Any], Any], params: Any, values: Callable[[Sequence[int]], list[jax.Array]]
) -> tuple[Any, Any, Sequence[int]]:
    """Differentiate `loss` by a traced program; see `Averaging.differentiate`.

    Args:
        params: arrays with the types of the parameters.
        values: a function of the order in which the program computes the gradients. It returns the parameters.
    """
    traced, shapes = jax.make_jaxpr(jax.grad(loss, has_aux=True), return_shape=True)(params)
    order = order_of_readiness(traced, len(jax.tree.leaves(params)))
    results = jaxpr_as_fun(traced)(*values(order))
    return *jax.tree.unflatten(jax.tree.structure(shapes), results), order


def order_of_readiness(traced: ClosedJaxpr, count: int) -> list[int]:
    """Sort the first `count` results of a traced program by the order in which the program computes them.

    If a result is only a cast or a new shape of an array, the time of that array counts, because the program may cast
    all results at its end.
    """
    equations = traced.jaxpr.eqns
    source = {result: index for index, equation in enumerate(equations) for result in equation.outvars}

    def ready_time(result: Any) -> int:
        index = -1
        while not isinstance(result, Literal) and result in source:
            index = source[result]
            inputs = [operand for operand in equations[index].invars if not isinstance(operand, Literal)]
            if len(inputs) != 1:
                return index if inputs else -1
            (result,) = inputs
        return index

    times = [ready_time(result) for result in traced.jaxpr.outvars[:count]]
    return sorted(range(count), key=times.__getitem__)


def compute_after(arrays: list[jax.Array], previous: jax.Array | None) -> list[jax.Array]:
    """Return the arrays unchanged, but make XLA compute `previous` first, if it is not None.

    The condition is never true, but XLA cannot derive this. An optimization barrier would prevent XLA from fusing the
    division of a mean with the operation that reads the mean.
    """
    if previous is None:
        return arrays
    return [jnp.where(previous.ravel()[:1].sum() > jnp.inf, 0, array) for array in arrays]


def _after(first: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
    """Return arrays with the values of a bucket that follow its first leaves."""
    if len(arrays) > 1 or not first:
        return arrays[len(first) :]
    return [arrays[0].ravel()[sum(leaf.size for leaf in first) :]]


def is_float(leaf: jax.Array) -> bool:
    """Return whether an array has a floating-point or complex dtype."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


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

    def combine(self, state: TrainState, contribution: Contribution, scale: jax.Array | float) -> Contribution:
        """Average the sums of `of_batch` over the devices; return a result like that of `of_batch`."""
        return self._divided(state, self._average(contribution, range(len(jax.tree.leaves(contribution.grads)))), scale)

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

    def _divided(self, state: TrainState, averaged: Contribution, scale: jax.Array | float) -> Contribution:
        """Divide the averaged gradients by the averaged weight."""
        grads, model_state, means, arrays = averaged
        arrays = grads if arrays is None else arrays
        model_state = with_frozen_state(state.model_state, model_state, self.settled, state.params)
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
        device_key = jax.random.fold_in(key, jax.lax.axis_index(device_axes()))
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
        part = jax.tree.map(lambda column: jax.lax.dynamic_index_in_dim(column, number, keepdims=False), parts)
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
        return jax.lax.scan(body, carry, jnp.arange(count))
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
