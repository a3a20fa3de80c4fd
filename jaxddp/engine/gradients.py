"""Compute the gradient of the global batch. Each device differentiates its slice, and the gradients are averaged."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxddp.config import Config
from jaxddp.core.errors import InputError, Key
from jaxddp.data.batch import Batch
from jaxddp.engine.buckets import AVERAGING, Averaging
from jaxddp.engine.groups.group_mesh import GroupMesh
from jaxddp.engine.microbatches import merge_states, scan_parts
from jaxddp.engine.objective import MetricSums, TrainObjective
from jaxddp.engine.reproducible import SHARDS, mean_of_shards
from jaxddp.engine.sharded.scattering import Scattering
from jaxddp.engine.sharded.sharded_state import sharded_specs
from jaxddp.engine.state import TrainState
from jaxddp.engine.unequal.slice_sizes import slice_sizes
from jaxddp.mesh import Topology, device_axes, varying
from jaxddp.models.variables import with_frozen, with_frozen_state, without_frozen
from jaxddp.platforms import platform_named
from jaxddp.sections.layers import NO_LAYERS, Layers

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

    The division into microbatches or shards changes results only if the network combines images, as batch norm does.

    Attributes:
        averaging: the average over the devices.
        accumulate: the number of microbatches into which a device divides its slice. Local batch norm normalizes each
            microbatch separately. Running statistics take the mean over microbatches and devices.
        reproducible: compute the gradients of 8 fixed shards and sum them in a fixed order; see
            `jaxddp.engine.reproducible`.
        shards_state: whether the parameters and the optimizer's state are divided among the devices between two
            steps; see `jaxddp.engine.sharded.sharded_step`.
        groups: the number of groups of devices; the gradients of different groups are not averaged. See
            `jaxddp.engine.groups.group_mesh`.
        for_cpu: whether XLA's CPU compiler compiles the program; see `jaxddp.engine.gradients` and
            `jaxddp.engine.reproducible.add_barrier`.
        frozen: layers whose parameters are not trained. The gradients of these parameters are None.
        settled: layers whose model state does not change.
        sizes: the number of examples of each device's slice, in mesh order; empty if all slices are equal. See
            `jaxddp.engine.unequal.unequal_step`.
    """

    averaging: Averaging = field(default_factory=Averaging)
    accumulate: int = 1
    reproducible: bool = False
    shards_state: bool = False
    groups: int = 1
    for_cpu: bool = False
    frozen: Layers = NO_LAYERS
    settled: Layers = NO_LAYERS
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Config, topology: Topology) -> "Gradients":
        """Create `Gradients` from a config. Raises: InputError if keys conflict or do not fit the devices."""
        reproducible = config.parallel.reproducible
        if reproducible:
            _check_reproducible(config, topology)
        sizes, groups = slice_sizes(config, topology), GroupMesh.of(config, topology)
        averaging = Averaging.of(config, topology if groups is None else groups.first)
        return cls(
            # The gradients of slices of different sizes are complete when they are averaged: nothing can overlap.
            averaging=replace(averaging, buckets=1) if sizes else averaging,
            accumulate=config.train.accumulate,
            reproducible=reproducible,
            shards_state=config.parallel.shard_optimizer and topology.num_devices > 1,
            groups=1 if groups is None else groups.count,
            for_cpu=platform_named(topology.platform).uses_cpu_compiler,
            frozen=config.frozen,
            settled=config.frozen_norms,
            sizes=sizes,
        )

    def specs(self, state: TrainState, topology: Topology) -> Any:
        """Return the `PartitionSpec` of each array of a state, or of its shapes, as a tree like the state."""
        if not self.shards_state:
            return jax.tree.map(lambda leaf: P(), state)
        return sharded_specs(state, topology.num_devices, self.frozen)

    def of_slices(self, specs: Any) -> "Gradients":
        """Return the settings for a state with the specs of `specs`.

        If the parameters are divided among the devices, the gradients of `of_batch` are each device's slices of the
        averages.
        """
        if not self.shards_state:
            return self
        average = self.averaging
        trained = without_frozen(specs.params, self.frozen)
        return replace(self, averaging=Scattering(average.buckets, average.dtype, average.ravels, specs=trained))

    def shares(self, topology: Topology) -> int:
        """Return the number of shares, the equal slices of the global batch whose gradients are averaged."""
        return SHARDS if self.reproducible else topology.num_devices

    def parts(self, topology: Topology) -> int:
        """Return the number of equal slices of the global batch that the network computes separately."""
        return self.shares(topology) * self.accumulate

    def check_batch_size(self, batch_size: int, topology: Topology) -> None:
        """Raise `InputError` if a batch cannot be divided into equal slices. The message suggests other batch sizes."""
        parts = self.parts(topology)
        if self.sizes:
            # `slice_sizes` checks the batch size.
            return
        if parts == topology.num_devices:
            topology.check_batch_size(batch_size)
        elif batch_size % parts:
            below = batch_size // parts * parts
            candidates = " or ".join(str(size) for size in (below, below + parts) if size > 0)
            devices = f"{topology.num_devices} device{'s' * (topology.num_devices > 1)}"
            shares = (f"the {SHARDS} shards of ", Key("parallel.reproducible")) if self.reproducible else devices
            microbatches = (" with ", Key("train.accumulate", self.accumulate), " microbatches each")
            raise InputError(
                Key("train.batch_size", batch_size),
                " cannot be divided among ",
                *(shares, microbatches if self.accumulate > 1 else ""),
                advice=f"{candidates} would do",
            )

    def of_batch(
        self,
        objective: TrainObjective,
        state: TrainState,
        batch: Batch,
        key: jax.Array,
        *,
        train: bool,
        image_key: jax.Array | None = None,
        scale: Any = 1,
    ) -> Contribution:
        """Compute the gradient of the mean loss over all unmasked examples of the global batch.

        Call it inside `jax.shard_map`. The returned model state and sums are means over the shares.

        Args:
            state: the state whose parameters and model state are used.
            batch: this device's slice.
            key: the random key of the step. Each share folds its number into the key.
            scale: a factor of the loss for differentiation. The gradient is divided by the same factor.
        """
        loss, params = self._minimized(objective, state, train=train, image_key=image_key, scale=scale)
        return self._divided(state, self.mean(loss, params, state.model_state, batch, key), scale)

    def of_slice(
        self,
        objective: TrainObjective,
        state: TrainState,
        batch: Batch,
        key: jax.Array,
        device: jax.Array,
        **words: Any,
    ) -> Contribution:
        """Compute the sums of one device over its slice, without communication; see `of_batch`.

        Args:
            device: the number of the device in the mesh, int32[].
        """
        loss, params = self._minimized(objective, state, **words)
        return self._share(loss, params, state.model_state, batch, jax.random.fold_in(key, device))[0]

    def combine(self, state: TrainState, contribution: Contribution, scale: Any) -> Contribution:
        """Average the results of `of_slice` over the devices; return a result like that of `of_batch`."""
        order = range(len(jax.tree.leaves(contribution.grads)))
        return self._divided(state, self._average(contribution, order), scale)

    def _minimized(
        self, objective: TrainObjective, state: TrainState, *, train: bool, image_key: jax.Array | None, scale: Any
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
        if self.reproducible:

            def shard(arrays: tuple[Any, Any], part: Batch, number: jax.Array) -> Contribution:
                return self._share(loss, *arrays, part, jax.random.fold_in(key, number))[0]

            return mean_of_shards(shard, (params, varying(model_state)), batch, for_cpu=self.for_cpu)
        device_key = jax.random.fold_in(key, lax.axis_index(device_axes()))
        return self._average(*self._share(loss, params, model_state, batch, device_key))

    def _share(
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
        grads, (states, sums) = scan_parts(add, zeros, batch, self.accumulate, unrolled=self.for_cpu)
        share = Contribution(grads, merge_states(states), jax.tree.map(lambda values: values.sum(0), sums))
        return share, range(len(jax.tree.leaves(grads)))


def _check_reproducible(config: Config, topology: Topology) -> None:
    key = Key("parallel.reproducible")
    if SHARDS % topology.num_devices:
        raise InputError(
            key,
            f": {SHARDS} shards cannot be divided evenly among {topology.num_devices} devices",
            advice=f"use 1, 2, 4 or {SHARDS} devices",
        )
    if config.model.batch_norm == "sync":
        raise InputError(
            *(key, ": "),
            Key.plain("model.batch_norm", "sync"),
            f" normalizes over devices, but each of the {SHARDS} shards is normalized separately",
            advice="set it to local or ghost:K",
        )
    for name, value in (
        ("train.gradient_precision", config.train.gradient_precision),
        ("parallel.buckets", config.parallel.buckets),
        ("parallel.shard_optimizer", config.parallel.shard_optimizer or None),
        ("train.sync_every", config.train.sync_every),
    ):
        if value is not None:
            conflict = (": ", Key.plain(name, value), " does not apply to a sum in fixed order")
            raise InputError(key, conflict, advice="leave it out")
