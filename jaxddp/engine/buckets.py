"""The average of the gradients over the devices, in buckets that travel while later gradients are computed.

XLA computes the gradients of images first and those of kernels where it likes, orders collectives by the use of their
results, and joins into one kernel what reads the same array. So that communication is hidden, for any network of
separate layers (a scan over layers has all its gradients at once):

- a bucket holds gradients that become ready one after the other, as the traced program tells (`order_of_readiness`);
- the later a bucket, the less is left to hide it behind, and the smaller it is (`cut`);
- each waits for the mean of the one before, so that they travel in this order (`Averaging.average`);
- the optimizer reads the parameters behind a barrier (`Averaging.parameters`). Otherwise the update of a kernel and its
  cast for the gradient of an image become one, and the backward pass waits for an all-reduce.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.flatten_util import ravel_pytree

from jaxddp.config import Config
from jaxddp.mesh import AXIS, Topology

AVERAGING = "average_gradients"
"""The scope of the all-reduces of gradients, by which a profile or a compiled program names them."""

GPU_BUCKETS = 7
"""With so many, all of a ResNet-50's communication has computing beside it; see BUILD_NOTES.md."""


@dataclass(frozen=True)
class Averaging:
    """How gradients travel between devices, and what is averaged with them.

    Attributes:
        buckets: all-reduces at most. Over gloo, and wherever nothing is computed meanwhile, one message is quickest.
        dtype: of gradients on their way; their own where None.
    """

    buckets: int = 1
    dtype: str | None = None

    @classmethod
    def of(cls, config: Config, topology: Topology) -> "Averaging":
        """What a config says; the number of buckets that suits the devices where it says none."""
        usual = GPU_BUCKETS if topology.platform == "gpu" else 1
        buckets = config.parallel.buckets or usual
        return cls(1 if topology.num_devices == 1 else buckets, config.train.gradient_precision)

    def differentiate(self, loss: Callable[[Any], Any], params: Any) -> tuple[Any, Any, Sequence[int]]:
        """The gradient of `loss`, which returns (loss, more); that `more`; and the order of the gradient's leaves.

        For several buckets the order is that in which they become ready.
        """
        gradient = jax.grad(loss, has_aux=True)
        if self.buckets == 1:
            grads, more = gradient(params)
            return grads, more, range(len(jax.tree.leaves(grads)))
        traced, shapes = jax.make_jaxpr(gradient, return_shape=True)(params)
        results = jaxpr_as_fun(traced)(*jax.tree.leaves(params))
        grads, more = jax.tree.unflatten(jax.tree.structure(shapes), results)
        return grads, more, order_of_readiness(traced, len(jax.tree.leaves(grads)))

    def average(self, grads: Any, others: Any, order: Sequence[int]) -> tuple[Any, Any]:
        """Means over the devices of all floating-point leaves; of others (counters) the maximum.

        Args:
            others: what is known before any gradient, batch statistics for one. It goes with the first bucket.
            order: of the leaves of `grads`.
        """
        if lax.axis_size(AXIS) == 1:
            # Either is what there is, and no collective is compiled.
            return jax.tree.map(lambda leaf: lax.pmax(leaf, AXIS), (grads, others))
        leaves, structure = jax.tree.flatten((grads, others))
        early = [place for place in range(len(order), len(leaves)) if _is_float(leaves[place])]
        sizes = [leaves[place].nbytes for place in order]
        buckets = [[order[i] for i in bucket] for bucket in cut(sizes, self.buckets)]
        # Only gradients are cast, and a buffer has one dtype.
        buckets = [early, *buckets] if self.dtype or not buckets else [early + buckets[0], *buckets[1:]]
        averaged = {place: lax.pmax(leaf, AXIS) for place, leaf in enumerate(leaves) if not _is_float(leaf)}
        before = None
        for bucket in buckets:
            buffer, unravel = ravel_pytree([leaves[place] for place in bucket])
            travelling = buffer if bucket is early or self.dtype is None else buffer.astype(self.dtype)
            if before is not None:
                travelling = _after(travelling, before)
            before = lax.pmean(travelling, AXIS)
            averaged.update(zip(bucket, unravel(before.astype(buffer.dtype)), strict=True))
        return jax.tree.unflatten(structure, [averaged[place] for place in range(len(leaves))])

    def parameters(self, params: Any) -> Any:
        """The parameters as the optimizer reads them."""
        return params if self.buckets == 1 else lax.optimization_barrier(params)


def stacked_over_devices(values: jax.Array) -> jax.Array:
    """The values of all devices, [N, ...], the same on each: to be called inside `jax.shard_map`.

    Each device fills its own place, and adds zeros to those of the others, which changes no number. So the replication
    checker sees that all devices have the same, which it does not of `lax.all_gather`.
    """
    places = jnp.zeros((lax.axis_size(AXIS), *values.shape), values.dtype)
    return lax.psum(places.at[lax.axis_index(AXIS)].set(values), AXIS)


def cut(sizes: Sequence[int], buckets: int) -> list[list[int]]:
    """The places of `sizes` in at most so many buckets, in order, none empty.

    Each bucket takes about half of what the ones before it leave; the last takes the rest.
    """
    total, passed = sum(sizes), 0
    found: list[list[int]] = [[] for _ in range(buckets)]
    for place, size in enumerate(sizes):
        # A leaf goes where its middle lies.
        left = 1 - (passed + size / 2) / total if total else 0.0
        passed += size
        found[next((i for i in range(buckets - 1) if left >= 0.5 ** (i + 1)), buckets - 1)].append(place)
    return [bucket for bucket in found if bucket]


def order_of_readiness(traced: ClosedJaxpr, count: int) -> list[int]:
    """The first `count` results of a traced program in the order in which it computes them.

    A cast or a change of shape counts as part of what it is made from: the casts of all parameters may stand together
    at one end of the program.
    """
    equations = traced.jaxpr.eqns
    maker = {result: place for place, equation in enumerate(equations) for result in equation.outvars}

    def ready(result: Any) -> int:
        place = -1
        while not isinstance(result, Literal) and result in maker:
            place = maker[result]
            inputs = [each for each in equations[place].invars if not isinstance(each, Literal)]
            if len(inputs) != 1:
                return place if inputs else -1
            (result,) = inputs
        return place

    places = [ready(result) for result in traced.jaxpr.outvars[:count]]
    return sorted(range(count), key=places.__getitem__)


def _after(buffer: jax.Array, before: jax.Array) -> jax.Array:
    """The buffer, for which what was `before` has to be there: XLA cannot tell that it does not depend on it.

    A barrier of both would keep a mean's division from becoming one kernel with what reads it.
    """
    return jnp.where(before[:1].sum() > jnp.inf, 0, buffer)


def _is_float(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
