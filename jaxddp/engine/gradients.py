"""How a step comes by the gradient of the global batch: in parts on each device, and then averaged over all."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.data.batch import Batch
from jaxddp.engine.buckets import AVERAGING, Averaging
from jaxddp.engine.microbatches import in_parts, merged
from jaxddp.engine.reproducible import SHARDS, mean_of_shards
from jaxddp.engine.state import TrainState
from jaxddp.engine.step_objective import MetricSums, TrainObjective
from jaxddp.mesh import AXIS, Topology, varying
from jaxddp.models.frozen import kept, trained, whole
from jaxddp.sections.layers import NO_LAYERS, Layers

StepLoss = Callable[..., tuple[jax.Array, tuple[MetricSums, Any]]]
"""(params, model_state, part of a batch, random key) -> (sum of the losses, (sums of metrics, next model state))."""


class Share(NamedTuple):
    """What a part of the global batch contributes."""

    grads: Any
    """Of the sum of its losses."""
    model_state: Any
    sums: MetricSums
    undivided: Any = None
    """Of `Gradients.of_batch`: the gradients before their division. They are as finite, and asking them costs less: XLA
    writes down what has two uses."""


@dataclass(frozen=True)
class Gradients:
    """The way to the gradient, which changes a network's numbers only where it looks at more than one image.

    Attributes:
        averaging: how gradients travel between the devices.
        accumulate: in how many microbatches a device computes its slice; with local batch norm each is normalized by
            itself, and running statistics take the mean of theirs, as they do over devices.
        reproducible: compute 8 fixed shards and sum them in a fixed order; see `jaxddp.engine.reproducible`.
        for_cpu: the program is for XLA's CPU compiler: see `jaxddp.engine.microbatches` and, of walls, the module named
            above.
        frozen: layers whose parameters are not differentiated: None stands for their gradients.
        kept: layers whose part of the model's state stays as it is.
    """

    averaging: Averaging = field(default_factory=Averaging)
    accumulate: int = 1
    reproducible: bool = False
    for_cpu: bool = False
    frozen: Layers = NO_LAYERS
    kept: Layers = NO_LAYERS

    @classmethod
    def of(cls, config: Config, topology: Topology) -> "Gradients":
        """What a config says. Raises: InputError; its keys, or the devices, contradict each other."""
        reproducible = config.parallel.reproducible
        if reproducible:
            _check_reproducible(config, topology)
        return cls(
            averaging=Averaging.of(config, topology),
            accumulate=config.train.accumulate,
            reproducible=reproducible,
            for_cpu=topology.platform == "cpu",
            frozen=config.frozen,
            kept=config.settled,
        )

    def shares(self, topology: Topology) -> int:
        """How many equal shares of the global batch the mean is taken over."""
        return SHARDS if self.reproducible else topology.num_devices

    def parts(self, topology: Topology) -> int:
        """How many equal parts of the global batch are computed by themselves."""
        return self.shares(topology) * self.accumulate

    def check_batch_size(self, batch_size: int, topology: Topology) -> None:
        """Raises `InputError` where a batch cannot be divided into the parts; says which can."""
        parts = self.parts(topology)
        if parts == topology.num_devices:
            topology.check_batch_size(batch_size)
        elif batch_size % parts:
            below = batch_size // parts * parts
            near = " or ".join(str(size) for size in (below, below + parts) if size > 0)
            devices = f"{topology.num_devices} device{'s' * (topology.num_devices > 1)}"
            shares = (f"the {SHARDS} shards of ", Key("parallel.reproducible")) if self.reproducible else devices
            each = (" with ", Key("train.accumulate", self.accumulate), " microbatches each")
            raise InputError(
                Key("train.batch_size", batch_size),
                " cannot be divided among ",
                *(shares, each if self.accumulate > 1 else ""),
                advice=f"{near} would do",
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
    ) -> Share:
        """Of the mean loss over all examples of the global batch that count: to be called inside `jax.shard_map`.

        The model's state and the sums are means over the shares. `scale` multiplies the loss while it is
        differentiated, and divides the gradient.

        Args:
            state: of which parameters and the model's state are read.
            batch: this device's slice.
            key: of the step; each share has its own fold of it.
        """
        # The gradient of replicated parameters comes out summed over the devices, N times too large: cast first.
        all_params = lax.pcast(state.params, AXIS, to="varying")

        def total_loss(params: Any, model_state: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, Any]:
            params = whole(params, all_params)
            sums, model_state = objective(params, model_state, batch, train=train, key=key, image_key=image_key)
            return sums.values[0, 0] * scale, (sums, model_state)

        params = trained(all_params, self.frozen)
        grads, model_state, means, _ = self.mean(total_loss, params, state.model_state, batch, key)
        model_state = kept(state.model_state, model_state, self.kept)
        # Sums of gradients were averaged, so one division by the average weight gives the mean over all examples that
        # count, however unevenly padding fell on the devices. Below what is normal, XLA takes it for 0.
        weight = jnp.maximum(means.values[0, 1] * scale, jnp.finfo(means.values.dtype).tiny)
        return Share(jax.tree.map(lambda g: g / weight.astype(g.dtype), grads), model_state, means, grads)

    def mean(self, loss: StepLoss, params: Any, model_state: Any, batch: Batch, key: jax.Array) -> Share:
        """The mean over the shares of the global batch: to be called inside `jax.shard_map`, with varying `params`.

        The key of a share is that of the step, folded with its number.
        """
        if self.reproducible:

            def shard(arrays: tuple[Any, Any], part: Batch, number: jax.Array) -> Share:
                return self._share(loss, *arrays, part, jax.random.fold_in(key, number))[0]

            return mean_of_shards(shard, (params, varying(model_state)), batch, for_cpu=self.for_cpu)
        own = jax.random.fold_in(key, lax.axis_index(AXIS))
        (grads, *others, _), order = self._share(loss, params, model_state, batch, own)
        with jax.named_scope(AVERAGING):
            grads, others = self.averaging.average(grads, others, order)
        return Share(grads, *others)

    def _share(
        self, loss: StepLoss, params: Any, model_state: Any, batch: Batch, key: jax.Array
    ) -> tuple[Share, Sequence[int]]:
        """A device's slice, or a shard of it; and the order of its gradients, see `Averaging`."""

        def differentiated(part: Batch, key: jax.Array) -> tuple[Share, Sequence[int]]:
            own_loss = functools.partial(loss, model_state=model_state, batch=part, key=key)
            grads, (sums, state), order = self.averaging.differentiate(own_loss, params)
            return Share(grads, state, sums), order

        if self.accumulate == 1:
            return differentiated(batch, key)

        def add(total: Any, part: Batch, number: jax.Array) -> tuple[Any, tuple[Any, MetricSums]]:
            (grads, state, sums, _), _ = differentiated(part, jax.random.fold_in(key, number))
            return jax.tree.map(jnp.add, total, grads), (state, sums)

        zeros = varying(jax.tree.map(jnp.zeros_like, params))
        grads, (states, sums) = in_parts(add, zeros, batch, self.accumulate, unrolled=self.for_cpu)
        share = Share(grads, merged(states), jax.tree.map(lambda values: values.sum(0), sums))
        return share, range(len(jax.tree.leaves(grads)))


def _check_reproducible(config: Config, topology: Topology) -> None:
    key = Key("parallel.reproducible")
    if SHARDS % topology.num_devices:
        raise InputError(
            key,
            f": {topology.num_devices} devices cannot share {SHARDS} shards evenly",
            advice=f"use 1, 2, 4 or {SHARDS} devices",
        )
    if config.model.batch_norm == "sync":
        raise InputError(
            *(key, ": "),
            Key.plain("model.batch_norm", "sync"),
            f" normalizes over devices, and each of {SHARDS} shards is normalized by itself",
            advice="set it to local or ghost:K",
        )
    for name, value in (
        ("train.gradient_precision", config.train.gradient_precision),
        ("parallel.buckets", config.parallel.buckets),
    ):
        if value is not None:
            told = (": ", Key.plain(name, value), " has no place in a sum of fixed order")
            raise InputError(key, told, advice="leave it out")
