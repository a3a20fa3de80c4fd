"""Average gradients over the devices in buckets, so that communication overlaps with the backward pass.

XLA computes the gradients with respect to activations first, and the gradients with respect to kernels in any order. It
sends all-reduces in the order in which their results are used, and fuses operations that read the same array. Four
rules make communication overlap with computation in any network of separate layers (a scan over layers produces all
gradients at once):

- A bucket holds gradients that the traced program computes one after the other (`order_of_readiness`).
- Later buckets are smaller, because less computation is left that can overlap with them (`fill_in_order`).
- Each all-reduce waits for the previous one, so the buckets are sent in this order (`Averaging.average`).
- The optimizer reads the parameters behind a barrier (`Averaging.parameters`). Otherwise XLA fuses the update of a
  kernel with the cast of the kernel for an activation's gradient, so the backward pass waits for an all-reduce.

On one GPU nothing is sent, but gradients are ravelled too. A few kernels then check and update what otherwise takes a
kernel for each array.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.flatten_util import ravel_pytree

from jaxddp.mesh import AXIS, Topology, device_axes
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
        if lax.axis_size(AXIS) == 1:
            return self._alone(grads, other_values)
        leaves, structure = jax.tree.flatten((grads, other_values))
        early = [index for index in range(len(order), len(leaves)) if is_float(leaves[index])]
        buckets = self._arrange(early, leaves, order)
        averaged = {index: lax.pmax(leaf, AXIS) for index, leaf in enumerate(leaves) if not is_float(leaf)}
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
        # Mean and maximum are equal, and XLA compiles no collective.
        leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: lax.pmax(leaf, AXIS), (other_values, grads)))
        first = len(jax.tree.leaves(other_values))
        ravelled = [index for index, leaf in enumerate(leaves) if is_float(leaf) and leaf.size <= self.ravels_alone]
        gradients = [leaf for index, leaf in enumerate(leaves[first:], first) if index not in ravelled]
        if ravelled:
            buffer, unravel = ravel_pytree([leaves[index] for index in ravelled])
            # Without the barrier XLA would read the leaves in place of the array.
            buffer = lax.optimization_barrier(buffer)
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
        message = arrays if dtype is None else [x.astype(dtype) for x in arrays]
        if previous is not None:
            message = [compute_after(x, previous) for x in message]
        means = lax.pmean(message, AXIS)
        results = [mean.astype(x.dtype) for mean, x in zip(means, arrays, strict=True)]
        return results if unravel is None else unravel(results[0]), means

    def parameters(self, params: Any) -> Any:
        """Return the parameters for the optimizer, behind a barrier if there are several buckets."""
        return params if self.buckets == 1 else lax.optimization_barrier(params)


def stack_over_devices(values: jax.Array) -> jax.Array:
    """Gather the values of all N devices of the program as [N, ...], replicated. Call it inside `jax.shard_map`.

    Each device fills its own slot and adds zeros to the other slots, so the sum changes no value. `shard_map`'s
    replication checker accepts this result as replicated, but not the result of `lax.all_gather`.
    """
    axes = device_axes()
    slots = jnp.zeros((lax.axis_size(axes), *values.shape), values.dtype)
    return lax.psum(slots.at[lax.axis_index(axes)].set(values), axes)


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


def compute_after(buffer: jax.Array, previous: jax.Array) -> jax.Array:
    """Return the buffer unchanged, but make XLA compute `previous` first.

    The condition is never true, but XLA cannot derive this. An optimization barrier would prevent XLA from fusing the
    division of a mean with the operation that reads the mean.
    """
    return jnp.where(previous.ravel()[:1].sum() > jnp.inf, 0, buffer)


def _after(first: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
    """Return arrays with the values of a bucket that follow its first leaves."""
    if len(arrays) > 1 or not first:
        return arrays[len(first) :]
    return [arrays[0].ravel()[sum(leaf.size for leaf in first) :]]


def is_float(leaf: jax.Array) -> bool:
    """Return whether an array has a floating-point or complex dtype."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
