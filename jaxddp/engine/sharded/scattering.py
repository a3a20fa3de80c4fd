"""Average gradients by reduce-scatters, after which each device holds the averages of its slices of the arrays.

The parameters are gathered at the start of a step. A reduce-scatter and an all-gather together send as many bytes as
an all-reduce (Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, stages 1 and 2).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from jaxddp.engine.buckets import Averaging, compute_after, fill_in_order, order_of_readiness
from jaxddp.engine.sharded.sharded_state import axis_of
from jaxddp.mesh import AXIS, varying


@dataclass(frozen=True)
class Scattering(Averaging):
    """The settings and functions that gather parameters, and average gradients by reduce-scatters.

    Attributes:
        specs: the `PartitionSpec` of each trained parameter; see `jaxddp.engine.sharded.sharded_state`.
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
        return super().parameters(params)

    @functools.cached_property
    def _axes(self) -> list[int | None]:
        return [axis_of(spec) for spec in jax.tree.leaves(self.specs, is_leaf=lambda node: isinstance(node, P))]

    def _whole_shape(self, index: int, leaf: jax.Array) -> tuple[int, ...]:
        axis = self._axes[index]
        return leaf.shape if axis is None else _with_size(leaf.shape, axis, leaf.shape[axis] * lax.axis_size(AXIS))

    def _gather(self, slices: list[jax.Array], order: Sequence[int]) -> list[jax.Array]:
        """Gather arrays in the reverse of `order`, in which their gradients are ready."""
        axes, whole, previous = self._axes, list(slices), None
        divided = [index for index in order if axes[index] is not None]
        for bucket in reversed(fill_in_order(slices, divided, self.buckets)):
            bucket_axes = [axis for index in bucket if (axis := axes[index]) is not None]
            arrays, previous = self._all_gather([slices[index] for index in bucket], bucket_axes, previous)
            for index, array in zip(bucket, arrays, strict=True):
                whole[index] = array
        return whole

    def _all_gather(
        self, slices: list[jax.Array], axes: list[int], previous: jax.Array | None
    ) -> tuple[list[jax.Array], jax.Array]:
        """Gather the arrays of a bucket; see `_mean` for the result."""
        if not self.ravels:
            pairs = zip(_all_after(slices, previous), axes, strict=True)
            gathered = [lax.all_gather(array, AXIS, axis=axis, tiled=True) for array, axis in pairs]
            return gathered, gathered[0]
        (message,) = _all_after([_concatenated([array.ravel() for array in slices])], previous)
        rows = lax.all_gather(message, AXIS)
        parts = _split(rows, [array.size for array in slices])
        joined = [
            _joined(part.astype(array.dtype), array.shape, axis)
            for part, array, axis in zip(parts, slices, axes, strict=True)
        ]
        return joined, rows

    def _arrange(self, early: list[int], leaves: list[jax.Array], order: Sequence[int]) -> list[list[int]]:
        """Return buckets of gradients that are scattered, and a last bucket of gradients that every device needs."""
        axes = self._axes
        divided = [index for index in order if axes[index] is not None]
        whole = [index for index in order if axes[index] is None]
        return [early, *fill_in_order(leaves, divided, self.buckets), *([whole] if whole else [])]

    def _mean(
        self, bucket: list[int], leaves: list[jax.Array], dtype: str | None, previous: jax.Array | None
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Average the leaves of a bucket in one reduce-scatter, and return each device's slices of the means."""
        axes = [axis for index in bucket if index < len(self._axes) and (axis := self._axes[index]) is not None]
        if len(axes) < len(bucket):
            return super()._mean(bucket, leaves, dtype, previous)
        count = lax.axis_size(AXIS)
        pairs = list(zip(leaves, axes, strict=True))
        shapes = [_with_size(leaf.shape, axis, leaf.shape[axis] // count) for leaf, axis in pairs]
        arrays = [_concatenated([_divided(leaf, count, axis) for leaf, axis in pairs])] if self.ravels else leaves
        message = _all_after(arrays if dtype is None else [array.astype(dtype) for array in arrays], previous)
        if self.ravels:
            mean = lax.psum_scatter(message[0], AXIS) / count
            arrays, means = [mean], _split(mean, [math.prod(shape) for shape in shapes])
        else:
            sends = zip(message, axes, strict=True)
            means = [lax.psum_scatter(array, AXIS, scatter_dimension=axis, tiled=True) / count for array, axis in sends]
            arrays = means
        slices = [
            mean.astype(leaf.dtype).reshape(shape) for mean, leaf, shape in zip(means, leaves, shapes, strict=True)
        ]
        return slices, arrays


def _all_after(arrays: list[jax.Array], previous: jax.Array | None) -> list[jax.Array]:
    return arrays if previous is None else [compute_after(array, previous) for array in arrays]


def _with_size(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _divided(array: jax.Array, count: int, axis: int) -> jax.Array:
    """Return the slices of an array along an axis as rows, [count, elements of a slice]."""
    slices = array.reshape(*array.shape[:axis], count, -1, *array.shape[axis + 1 :])
    return jnp.moveaxis(slices, axis, 0).reshape(count, -1)


def _joined(rows: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Return the array whose slices along an axis, with the given shape, are `rows`.

    The reshape comes last. If a transpose did, XLA would give its result a layout in which every array that it is added
    to is transposed, such as the activations of a transformer.
    """
    slices = jnp.moveaxis(rows.reshape(-1, *shape), 0, axis)
    return slices.reshape(_with_size(shape, axis, len(rows) * shape[axis]))


def _concatenated(arrays: list[jax.Array]) -> jax.Array:
    """Concatenate arrays along their last axis, in a dtype that holds the values of all of them."""
    return jnp.concatenate([array.astype(jnp.result_type(*arrays)) for array in arrays], axis=-1)


def _split(array: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Divide an array along its last axis into parts of the given sizes."""
    return jnp.split(array, list(itertools.accumulate(sizes))[:-1], axis=-1)
