"""Average gradients by reduce-scatters, after which each device holds the averages of its slices of the arrays.

The parameters are gathered at the start of a step. A reduce-scatter and an all-gather together send as many bytes as
an all-reduce (Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, stages 1 and 2).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jax.sharding import PartitionSpec as P

from jaxddp.engine.buckets import Averaging, compute_after, fill_in_order, order_of_readiness
from jaxddp.engine.sharded_state import axis_of
from jaxddp.mesh import AXIS, varying


@dataclass(frozen=True)
class Scattering(Averaging):
    """The settings and functions that gather parameters, and average gradients by reduce-scatters.

    Attributes:
        specs: the `PartitionSpec` of each trained parameter; see `jaxddp.engine.sharded_state`.
    """

    specs: Any = None

    def gathered(self, params: Any) -> tuple[Any, Averaging]:
        """Return whole parameters from slices, and the settings that differentiate them, for several microbatches."""
        leaves, structure = jax.tree.flatten(params)
        whole = jax.tree.unflatten(structure, self._gather(leaves, range(len(leaves))))
        return whole, Averaging(self.buckets, self.dtype, self.ravels)

    def differentiate(self, loss: Callable[[Any], Any], params: Any) -> tuple[Any, Any, Sequence[int]]:
        """Differentiate `loss` at the parameters whose slices are `params`; see `Averaging.differentiate`.

        The parameters that the forward pass uses first are gathered first.
        """
        slices, structure = jax.tree.flatten(params)
        # The trace needs only the types of the parameters, which vary over the devices.
        zeros = varying([jnp.zeros(self._whole_shape(index, leaf), leaf.dtype) for index, leaf in enumerate(slices)])
        gradient = jax.grad(loss, has_aux=True)
        traced, shapes = jax.make_jaxpr(gradient, return_shape=True)(jax.tree.unflatten(structure, zeros))
        order = order_of_readiness(traced, len(slices))
        results = jaxpr_as_fun(traced)(*self._gather(slices, order))
        return *jax.tree.unflatten(jax.tree.structure(shapes), results), order

    def parameters(self, params: Any) -> Any:
        """Return the parameters for the optimizer. The network reads other arrays, so they need no barrier."""
        return params

    @property
    def _axes(self) -> list[int | None]:
        return [axis_of(spec) for spec in jax.tree.leaves(self.specs, is_leaf=lambda node: isinstance(node, P))]

    def _whole_shape(self, index: int, leaf: jax.Array) -> tuple[int, ...]:
        axis = self._axes[index]
        return tuple(size * (lax.axis_size(AXIS) if at == axis else 1) for at, size in enumerate(leaf.shape))

    def _gather(self, slices: list[jax.Array], order: Sequence[int]) -> list[jax.Array]:
        """Gather arrays in the reverse of `order`, in which their gradients are ready."""
        axes, whole, previous = self._axes, list(slices), None
        divided = [index for index in order if axes[index] is not None]
        for bucket in reversed(fill_in_order(slices, divided, self.buckets)):
            moved = [jnp.moveaxis(slices[index], axes[index], 0) for index in bucket]
            message = [_concatenated([leaf.ravel() for leaf in moved])] if self.ravels else moved
            if previous is not None:
                message = [compute_after(array, previous) for array in message]
            gathered = [lax.all_gather(array, AXIS, tiled=not self.ravels) for array in message]
            previous = gathered[0]
            parts = _split(previous, [leaf.size for leaf in moved]) if self.ravels else gathered
            for index, leaf, part in zip(bucket, moved, parts, strict=True):
                array = part.reshape(-1, *leaf.shape[1:]).astype(leaf.dtype)
                whole[index] = jnp.moveaxis(array, 0, axes[index])
        return whole

    def _arrange(self, early: list[int], leaves: list[jax.Array], order: Sequence[int]) -> list[list[int]]:
        """Return buckets of gradients that are scattered, and a last bucket of gradients that every device needs."""
        axes = self._axes
        divided = [index for index in order if axes[index] is not None]
        whole = [index for index in order if axes[index] is None]
        return [early, *fill_in_order(leaves, divided, self.buckets), *([whole] if whole else [])]

    def _mean(
        self, bucket: list[int], leaves: list[jax.Array], dtype: str | None, previous: jax.Array | None
    ) -> tuple[list[jax.Array], jax.Array]:
        """Average the leaves of a bucket in one reduce-scatter, and return each device's slices of the means."""
        axes = [(self._axes[index] if index < len(self._axes) else None) for index in bucket]
        if None in axes:
            return super()._mean(bucket, leaves, dtype, previous)
        count = lax.axis_size(AXIS)
        moved = [jnp.moveaxis(leaf, axis, 0) for leaf, axis in zip(leaves, axes, strict=True)]
        rows = [leaf.reshape(count, -1) for leaf in moved]
        message = [_concatenated(rows)] if self.ravels else rows
        message = message if dtype is None else [array.astype(dtype) for array in message]
        if previous is not None:
            message = [compute_after(array, previous) for array in message]
        means = [lax.psum_scatter(array, AXIS) / count for array in message]
        parts = _split(means[0], [row.shape[1] for row in rows]) if self.ravels else means
        slices = [
            jnp.moveaxis(part.reshape(-1, *leaf.shape[1:]).astype(leaf.dtype), 0, axis)
            for part, leaf, axis in zip(parts, moved, axes, strict=True)
        ]
        return slices, means[0]


def _concatenated(arrays: list[jax.Array]) -> jax.Array:
    """Concatenate arrays along their last axis, in a dtype that holds the values of all of them."""
    return jnp.concatenate([array.astype(jnp.result_type(*arrays)) for array in arrays], axis=-1)


def _split(array: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Divide an array along its last axis into parts of the given sizes."""
    return jnp.split(array, list(itertools.accumulate(sizes))[:-1], axis=-1)
