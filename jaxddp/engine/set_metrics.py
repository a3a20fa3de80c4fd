"""Numbers of a whole set that are no means over its examples, such as the area under a curve: for evaluation alone.

Each batch contributes arrays, which all devices and batches bring together; the host makes numbers of them, once a set.
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
from jaxddp.engine.buckets import stacked_over_devices
from jaxddp.engine.example_loss import random_batches
from jaxddp.mesh import AXIS


class SumsMetric(Protocol):
    """A metric of sums over the examples, such as counts by class."""

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        """Arrays that add up over the parts of a set: of float[B, K], labels and float[B], 0 where padded.

        A padded example's logits are finite, and must not count.
        """
        ...

    def finish(self, found: Any) -> Mapping[str, float]:
        """Numbers by name, of the sums over the set, NumPy arrays."""
        ...


class ExamplesMetric(Protocol):
    """A metric that needs all examples at once. What it keeps of them is held in the host's memory."""

    def examples(self, logits: jax.Array, labels: jax.Array) -> Any:
        """Arrays [B, …] of numbers, of float[B, K] and labels."""
        ...

    def finish(self, found: Any) -> Mapping[str, float]:
        """Numbers by name, of the arrays [N, …] of the whole set, in its order, NumPy arrays."""
        ...


SetMetric = SumsMetric | ExamplesMetric
"""A metric over a whole set of examples."""


class Kept(NamedTuple):
    """What an `ExamplesMetric` keeps of the examples of one batch."""

    arrays: Any
    mask: jax.Array


def is_set_metric(metric: Any) -> bool:
    """Whether it has the methods of one."""
    return callable(getattr(metric, "finish", None))


def measured(metrics: Mapping[str, Any], logits: jax.Array, labels: jax.Array, mask: jax.Array) -> dict[str, Any]:
    """What a slice of a batch contributes to each metric over the set; others among the metrics are left out."""

    of_set = {name: metric for name, metric in metrics.items() if is_set_metric(metric)}
    if not of_set:
        return {}
    # Of padding a network may make anything.
    real = jnp.where(mask[:, None] > 0, logits, 0)
    return {name: _of_slice(metric, real, labels, mask) for name, metric in of_set.items()}


def over_devices(contributions: Mapping[str, Any]) -> dict[str, Any]:
    """The contributions of all devices, the same on each: to be called inside `jax.shard_map`.

    Sums are added up; what is kept of examples stands in the order of the batch.
    """

    def beside(values: jax.Array) -> jax.Array:
        return stacked_over_devices(values.astype(_number(values.dtype))).reshape(-1, *values.shape[1:])

    def together(found: Any) -> Any:
        if isinstance(found, Kept):
            return jax.tree.map(beside, found)
        return jax.tree.map(lambda values: lax.psum(values, AXIS), found)

    return {name: together(found) for name, found in contributions.items()}


def finished(metrics: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of all metrics over the set, of what the whole set contributed."""
    numbers: dict[str, float] = {}
    for name in (name for name in metrics if name in found):
        numbers |= {key: float(value) for key, value in metrics[name].finish(found[name]).items()}
    return numbers


def check_set_metric(metric: Any, name: str, labels: LabelKind) -> tuple[str, ...]:
    """The names of a metric's numbers. It is tried on random logits, with every class among the labels.

    Raises:
        InputError: it fails, returns something else, or what it makes of a batch depends on how that is divided.
    """
    if callable(getattr(metric, "sums", None)) is callable(getattr(metric, "examples", None)):
        raise InputError(f"{name}: a metric over a set has the method sums or examples beside finish; give one of them")
    logits, own = next(random_batches(labels))
    cut = len(logits) // 2
    try:
        whole = _tried(metric, [(logits, own)])
        parts = _tried(metric, [(logits[:cut], own[:cut]), (logits[cut:], own[cut:])])
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{name}: fails for logits float32{list(logits.shape)} and labels {own.dtype}{list(own.shape)}: "
            f"{type(error).__name__}: {reason}"
        ) from error
    for key, value in whole.items():
        if not np.allclose(value, parts[key], rtol=1e-4, atol=1e-4, equal_nan=True):
            raise InputError(
                f"{name}: {key} is {value:.6g} of a batch and {parts[key]:.6g} of its halves; return sums over the "
                "examples whose mask is 1, or arrays of one value for each example"
            )
    return tuple(whole)


def _of_slice(metric: Any, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
    if hasattr(metric, "examples"):
        return Kept(metric.examples(logits, labels), mask)
    return metric.sums(logits, labels, mask)


def _tried(metric: Any, parts: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """What a metric makes of a set of parts, each padded by an example."""
    found: list[Any] = []
    for logits, labels in parts:
        padded, mask = (np.concatenate([each, each[:1]]) for each in (logits, labels)), np.ones(len(logits) + 1)
        mask[-1] = 0
        found.append(jax.device_get(jax.jit(functools.partial(_of_slice, metric))(*padded, mask)))
    if isinstance(found[0], Kept):
        chosen = [jax.tree.map(lambda values, mask=each.mask: values[mask > 0], each.arrays) for each in found]
        whole = jax.tree.map(lambda *values: np.concatenate(values), *chosen)
    else:
        whole = jax.tree.map(lambda *values: sum(values[1:], values[0]), *found)
    return finished({"": metric}, {"": whole})


def _number(dtype: Any) -> Any:
    return jnp.int32 if dtype == jnp.bool_ else dtype
