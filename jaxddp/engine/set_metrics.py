"""Metrics over a whole set that are not means over examples, such as the area under a curve, for evaluation.

A metric computes arrays from each batch, its contribution. Contributions are combined over devices and batches. At the
end of the set, the host computes the metric's numbers from the combined arrays.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxddp.core.errors import InputError
from jaxddp.data.labels import LabelKind
from jaxddp.engine.buckets import stack_over_devices
from jaxddp.engine.example_loss import random_batches
from jaxddp.mesh import AXIS


class SumsMetric(Protocol):
    """A metric that is computed from sums over the examples, such as counts by class."""

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        """Return arrays that add up over the batches of a set.

        Args:
            logits: float[B, K]. The logits of padded examples are finite.
            mask: float[B], 0 for padded examples, which must not change the sums.
        """
        ...

    def finish(self, found: Any) -> Mapping[str, float]:
        """Return numbers by name. `found` is the sum over the set of the results of `sums`, as NumPy arrays."""
        ...


class ExamplesMetric(Protocol):
    """A metric that needs all examples at once. The host memory holds the results of `examples` for the whole set."""

    def examples(self, logits: jax.Array, labels: jax.Array) -> Any:
        """Return arrays of numbers, [B, …], from logits float[B, K] and labels."""
        ...

    def finish(self, found: Any) -> Mapping[str, float]:
        """Return numbers by name.

        Args:
            found: the result of `examples` for the whole set, as NumPy arrays [N, …] in the order of the set.
        """
        ...


SetMetric = SumsMetric | ExamplesMetric
"""A metric over a whole set of examples."""


class BatchArrays(NamedTuple):
    """The result of `ExamplesMetric.examples` for one batch, and the batch's mask."""

    arrays: Any
    mask: jax.Array


def is_set_metric(metric: Any) -> bool:
    """Return whether an object has the method `finish`, like every metric over a set."""
    return callable(getattr(metric, "finish", None))


def compute_contributions(
    metrics: Mapping[str, Any], logits: jax.Array, labels: jax.Array, mask: jax.Array
) -> dict[str, Any]:
    """Return the contribution of a slice of a batch to each metric over a set. Other metrics are ignored."""

    set_metrics = {name: metric for name, metric in metrics.items() if is_set_metric(metric)}
    if not set_metrics:
        return {}
    # The logits of padded examples may have any value, including NaN.
    unpadded = jnp.where(mask[:, None] > 0, logits, 0)
    return {name: _of_slice(metric, unpadded, labels, mask) for name, metric in set_metrics.items()}


def combine_devices(contributions: Mapping[str, Any]) -> dict[str, Any]:
    """Combine the contributions of all devices, replicated. Call it inside `jax.shard_map`.

    Sums are added. Arrays of examples are concatenated in the order of the batch.
    """

    def concatenate(values: jax.Array) -> jax.Array:
        return stack_over_devices(values.astype(_numeric_dtype(values.dtype))).reshape(-1, *values.shape[1:])

    def combine(found: Any) -> Any:
        if isinstance(found, BatchArrays):
            return jax.tree.map(concatenate, found)
        return jax.tree.map(lambda values: lax.psum(values, AXIS), found)

    return {name: combine(found) for name, found in contributions.items()}


def finish_metrics(metrics: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """Compute the numbers of all metrics over a set. `found` holds the combined contributions of the whole set."""
    numbers: dict[str, float] = {}
    for name in (name for name in metrics if name in found):
        numbers |= {key: float(value) for key, value in metrics[name].finish(found[name]).items()}
    return numbers


def check_set_metric(metric: Any, name: str, labels: LabelKind) -> tuple[str, ...]:
    """Try a metric on random logits with every class among the labels, and return the names of its numbers.

    Raises:
        InputError: the metric fails, does not have exactly one of the methods `sums` and `examples`, or has other
            numbers for a divided batch than for the whole batch.
    """
    if callable(getattr(metric, "sums", None)) is callable(getattr(metric, "examples", None)):
        raise InputError(f"{name}: a metric over a set needs finish and either sums or examples; give one of the two")
    logits, batch_labels = next(random_batches(labels))
    cut = len(logits) // 2
    try:
        whole = _try_metric(metric, [(logits, batch_labels)])
        parts = _try_metric(metric, [(logits[:cut], batch_labels[:cut]), (logits[cut:], batch_labels[cut:])])
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        types = f"logits float32{list(logits.shape)} and labels {batch_labels.dtype}{list(batch_labels.shape)}"
        raise InputError(f"{name}: fails for {types}: {type(error).__name__}: {reason}") from error
    for key, value in whole.items():
        if not np.allclose(value, parts[key], rtol=1e-4, atol=1e-4, equal_nan=True):
            raise InputError(
                f"{name}: {key} is {value:.6g} for a batch and {parts[key]:.6g} for its halves; return sums over the "
                "examples whose mask is 1, or arrays with one value for each example"
            )
    return tuple(whole)


def _of_slice(metric: Any, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
    if hasattr(metric, "examples"):
        return BatchArrays(metric.examples(logits, labels), mask)
    return metric.sums(logits, labels, mask)


def _try_metric(metric: Any, parts: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Return a metric's numbers for a set of these batches, each padded by one example."""
    batches: list[Any] = []
    for logits, labels in parts:
        padded, mask = (np.concatenate([array, array[:1]]) for array in (logits, labels)), np.ones(len(logits) + 1)
        mask[-1] = 0
        batches.append(jax.device_get(jax.jit(functools.partial(_of_slice, metric))(*padded, mask)))
    if isinstance(batches[0], BatchArrays):
        unpadded = [jax.tree.map(lambda values, mask=kept.mask: values[mask > 0], kept.arrays) for kept in batches]
        whole = jax.tree.map(lambda *values: np.concatenate(values), *unpadded)
    else:
        whole = jax.tree.map(lambda *values: sum(values[1:], values[0]), *batches)
    return finish_metrics({"": metric}, {"": whole})


def _numeric_dtype(dtype: Any) -> Any:
    return jnp.int32 if dtype == jnp.bool_ else dtype
