"""The mean of the classes' own accuracies, so that a rare class counts as much as a frequent one."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.metrics.top_k import TopK
from jaxddp.registry import METRICS


class MeanClassAccuracy:
    """Top-1 of each class, and their mean over the classes that occur: balanced accuracy (Brodersen et al. 2010).

    A set without examples has none, NaN.
    """

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """Of each class how many examples there are, and how many were right, int32[K]; see `SumsMetric`."""
        real = (mask > 0).astype(jnp.int32)
        right = real * TopK(1)(logits, labels).astype(jnp.int32)
        none = jnp.zeros(logits.shape[-1], jnp.int32)
        return {"right": none.at[labels].add(right), "examples": none.at[labels].add(real)}

    def finish(self, found: Any) -> Mapping[str, float]:
        there = found["examples"] > 0
        accuracies = found["right"][there] / found["examples"][there]
        return {"mean_class_accuracy": float(np.mean(accuracies)) if there.any() else float("nan")}


METRICS.add("mean_class_accuracy")(MeanClassAccuracy())
