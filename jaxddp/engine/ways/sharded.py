"""A step whose parameters and optimizer state are divided among the devices (ZeRO stages 1 and 2).

Each device gathers the parameters, differentiates its slice of the batch, and gets its slices of the averaged gradients
by a reduce-scatter, which with the all-gather sends as many bytes as an all-reduce (Rajbhandari et al. 2020, "ZeRO",
arXiv:1910.02054). This phase runs inside `shard_map`. The update is written for whole arrays, and XLA divides it among
the devices. So an optimizer that needs whole arrays, such as one that computes the norm of a layer's gradient, or a
part that clips by the global norm, gives the same result as without sharding, and XLA adds the communication.

An array is divided along its first axis whose size is a multiple of the number of devices. An array without such an
axis is whole on every device, and so are vectors, such as biases and the scales of norms: they are less than 1% of the
parameters, and dividing them needs more kernels. The global shapes do not change, so a checkpoint fits any number of
devices.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax

import jaxddp.engine.gradients as gradients
from jaxddp.config.layers import NO_LAYERS, Layers
from jaxddp.data.batch import Batch
from jaxddp.engine.parts.part import Follow, Part
from jaxddp.engine.programs import RESIDENT_FEED, Options, TrainStep, gather_batch
from jaxddp.engine.state import TrainState, all_finite
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Way
from jaxddp.kernels import path_of
from jaxddp.mesh import AXIS, varying
from jaxddp.models.interface import Keys, cast, without_frozen


@dataclass(frozen=True)
class Sharded(Way):
    """The devices divide the parameters and the optimizer's state between two steps."""

    def specs(self, state: TrainState) -> Any:
        return sharded_specs(state, self.topology.num_devices, self.gradients.frozen)

    def jit_init(self, init: Callable[..., TrainState], compiler_options: Options) -> Callable[..., TrainState]:
        def sharded_init(*arguments: Any) -> TrainState:
            places = self.shardings(jax.eval_shape(init, *arguments))
            return jax.jit(init, out_shardings=places, compiler_options=dict(compiler_options))(*arguments)

        return sharded_init

    def placed(self, state: TrainState) -> TrainState:
        return jax.device_put(state, self.shardings(state))

    def whole(self, state: TrainState) -> TrainState:
        # The optimizer's state stays divided, to save memory. An evaluation does not read it.
        params, parts = self._gather_state((state.params, state.parts))
        return state.replace(params=params, parts=parts)

    @functools.cached_property
    def _gather_state(self) -> Callable[[Any], Any]:
        return jax.jit(lambda arrays: arrays, out_shardings=self.topology.replicated)

    def one_step(self, phases: Phases) -> TrainStep:
        """Return the optimizer step of all devices on global arrays."""

        def sharded_step(state: TrainState, batch: Batch, key: jax.Array | None = None) -> tuple[TrainState, Any]:
            specs = self.specs(state)
            of_slices = replace(phases, gradients=self.gradients_of(specs))

            def gradient(state: TrainState, batch: Batch, key: Keys) -> tuple[gradients.Contribution, jax.Array]:
                contribution = of_slices.gradient(state, batch, key)
                finite = lax.pmin(all_finite(contribution.undivided).astype(jnp.int32), AXIS)
                return contribution._replace(undivided=None), finite

            in_specs = specs.replace(opt_state=()), P(AXIS), P()
            averages = gradients.Contribution(without_frozen(specs.params, self.gradients.frozen), P(), P())  # pyright: ignore
            on_devices = jax.shard_map(gradient, mesh=self.mesh, in_specs=in_specs, out_specs=(averages, P()))
            contribution, finite = on_devices(state.replace(opt_state=()), batch, key)
            state, sums = of_slices.update(state, contribution, lambda: finite > 0)
            return lax.with_sharding_constraint(state, self.shardings(state)), sums

        return sharded_step

    def on_devices(self, one_step: TrainStep, feed: tuple[P, ...]) -> TrainStep:
        return one_step

    @property
    def gather(self) -> Callable[..., Batch]:
        return jax.shard_map(gather_batch, mesh=self.mesh, in_specs=(*RESIDENT_FEED, P()), out_specs=P(AXIS))

    def follow(self, parts: Sequence[Part]) -> Follow:
        follow = super().follow(parts)
        return lambda state, metrics: self.placed(follow(state, metrics))

    def gradients_of(self, specs: Any) -> gradients.Gradients:
        """Return the computation of each device's slices of the averages, for a state with these specs."""
        average, trained = self.gradients.averaging, without_frozen(specs.params, self.gradients.frozen)
        leaves = jax.tree.leaves(trained, is_leaf=lambda node: isinstance(node, P))
        # The spec of a divided array ends with its axis; see `sharded_specs`. Other arrays are whole.
        axes = tuple(len(spec) - 1 if spec else None for spec in leaves)
        scattering = Scattering(average.buckets, average.dtype, average.ravels, axes=axes)
        return replace(self.gradients, averaging=scattering)


def sharded_axis(shape: tuple[int, ...], devices: int) -> int | None:
    """Return the axis along which an array is divided among the devices; None if no axis can be divided."""
    if devices == 1 or len(shape) < 2:
        return None
    return next((axis for axis, size in enumerate(shape) if size and size % devices == 0), None)


def sharded_specs(state: TrainState, devices: int, frozen: Layers = NO_LAYERS) -> Any:
    """Return the `PartitionSpec` of each array of a state, or of its shapes, as a tree like the state.

    The step's number and the model's state are whole on every device, and so are frozen parameters: they have no
    optimizer state, and every step reads all of them.
    """

    def spec(leaf: Any) -> P:
        axis = sharded_axis(leaf.shape, devices)
        return P() if axis is None else P(*[None] * axis, AXIS)

    def parameter_spec(path: Any, leaf: Any) -> P:
        return P() if frozen and path_of(path) in frozen else spec(leaf)

    return state.replace(
        step=P(),
        params=jax.tree_util.tree_map_with_path(parameter_spec, state.params),
        model_state=jax.tree.map(lambda leaf: P(), state.model_state),
        opt_state=jax.tree.map(spec, state.opt_state),
        parts=jax.tree.map(spec, state.parts),
    )


@dataclass(frozen=True)
class Scattering(gradients.Averaging):
    """The settings and functions that gather parameters, and average gradients by reduce-scatters.

    Attributes:
        axes: the axis along which each trained parameter is divided; see `sharded_axis`.
    """

    axes: tuple[int | None, ...] = ()

    def gathered(self, params: Any) -> tuple[Any, gradients.Averaging]:
        """Return whole parameters from slices, and the settings that differentiate them, for several microbatches."""
        leaves, structure = jax.tree.flatten(params)
        whole = jax.tree.unflatten(structure, self._gather(leaves, range(len(leaves))))
        return whole, gradients.Averaging(self.buckets, self.dtype, self.ravels)

    def differentiate(self, loss: Callable[[Any], Any], params: Any) -> tuple[Any, Any, Sequence[int]]:
        """Differentiate `loss` at the parameters whose slices are `params`; see `Averaging.differentiate`.

        The parameters that the forward pass uses first are gathered first.
        """
        slices, structure = jax.tree.flatten(params)
        # The trace needs only the types of the parameters, which vary over the devices.
        zeros = [
            jnp.zeros(leaf.shape if axis is None else _scaled(leaf.shape, axis, lax.axis_size(AXIS)), leaf.dtype)
            for leaf, axis in zip(slices, self.axes, strict=True)
        ]
        whole = jax.tree.unflatten(structure, varying(zeros))
        return gradients.differentiate_in_order(loss, whole, lambda order: self._gather(slices, order))

    def _gather(self, slices: list[jax.Array], order: Sequence[int]) -> list[jax.Array]:
        """Gather arrays in the reverse of `order`, in which their gradients are ready."""
        whole, previous = list(slices), None
        divided = [index for index in order if self.axes[index] is not None]
        for bucket in reversed(gradients.fill_in_order(slices, divided, self.buckets)):
            axes: Any = [self.axes[index] for index in bucket]
            arrays, previous = self._all_gather([slices[index] for index in bucket], axes, previous)
            for index, array in zip(bucket, arrays, strict=True):
                whole[index] = array
        return whole

    def _all_gather(
        self, slices: list[jax.Array], axes: list[int], previous: jax.Array | None
    ) -> tuple[list[jax.Array], jax.Array]:
        """Gather the arrays of a bucket; see `_mean` for the result."""
        if not self.ravels:
            pairs = zip(gradients.compute_after(slices, previous), axes, strict=True)
            gathered = [lax.all_gather(array, AXIS, axis=axis, tiled=True) for array, axis in pairs]
            return gathered, gathered[0]
        (message,) = gradients.compute_after([_concatenated([array.ravel() for array in slices])], previous)
        rows = lax.all_gather(message, AXIS)
        parts = zip(_split(rows, [array.size for array in slices]), slices, axes, strict=True)
        return [_joined(part.astype(array.dtype), array.shape, axis) for part, array, axis in parts], rows

    def _arrange(self, early: list[int], leaves: list[jax.Array], order: Sequence[int]) -> list[list[int]]:
        """Return buckets of gradients that are scattered, and a last bucket of gradients that every device needs."""
        divided = [index for index in order if self.axes[index] is not None]
        whole = [index for index in order if self.axes[index] is None]
        return [early, *gradients.fill_in_order(leaves, divided, self.buckets), *([whole] if whole else [])]

    def _mean(
        self, bucket: list[int], leaves: list[jax.Array], dtype: str | None, previous: jax.Array | None
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Average the leaves of a bucket in one reduce-scatter, and return each device's slices of the means."""
        axes = [axis for index in bucket if index < len(self.axes) and (axis := self.axes[index]) is not None]
        if len(axes) < len(bucket):
            return super()._mean(bucket, leaves, dtype, previous)
        count = lax.axis_size(AXIS)
        pairs = list(zip(leaves, axes, strict=True))
        arrays = [_concatenated([_divided(leaf, count, axis) for leaf, axis in pairs])] if self.ravels else leaves
        message = gradients.compute_after(cast(arrays, dtype), previous)
        if self.ravels:
            arrays = [lax.psum_scatter(message[0], AXIS) / count]
            means = _split(arrays[0], [leaf.size // count for leaf in leaves])
        else:
            sends = zip(message, axes, strict=True)
            means = [lax.psum_scatter(array, AXIS, scatter_dimension=axis, tiled=True) / count for array, axis in sends]
            arrays = means
        shapes = [(*leaf.shape[:axis], leaf.shape[axis] // count, *leaf.shape[axis + 1 :]) for leaf, axis in pairs]
        triples = zip(means, leaves, shapes, strict=True)
        return [mean.astype(leaf.dtype).reshape(shape) for mean, leaf, shape in triples], arrays


def _scaled(shape: tuple[int, ...], axis: int, factor: int) -> tuple[int, ...]:
    return (*shape[:axis], factor * shape[axis], *shape[axis + 1 :])


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
    return slices.reshape(_scaled(shape, axis, len(rows)))


def _concatenated(arrays: list[jax.Array]) -> jax.Array:
    """Concatenate arrays along their last axis, in a dtype that holds the values of all of them."""
    return jnp.concatenate([array.astype(jnp.result_type(*arrays)) for array in arrays], axis=-1)


def _split(array: jax.Array, lengths: Sequence[int]) -> list[jax.Array]:
    """Divide an array along its last axis into parts of the given lengths."""
    return jnp.split(array, list(itertools.accumulate(lengths))[:-1], axis=-1)
