"""The mean of the classes' accuracies. A rare class has the same weight as a frequent one."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.metrics.top_k import TopK
from jaxddp.registry import METRICS


class MeanClassAccuracy:
    """The mean top-1 accuracy over the classes that occur: balanced accuracy (Brodersen et al. 2010).

    The metric is NaN for a set without examples.
    """

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """Count for each class the examples and the right predictions, int32[K] each; see `SumsMetric`."""
        real = (mask > 0).astype(jnp.int32)
        right = real * TopK(1)(logits, labels).astype(jnp.int32)
        zeros = jnp.zeros(logits.shape[-1], jnp.int32)
        return {"right": zeros.at[labels].add(right), "examples": zeros.at[labels].add(real)}

    def finish(self, found: Any) -> Mapping[str, float]:
        occurs = found["examples"] > 0
        accuracies = found["right"][occurs] / found["examples"][occurs]
        return {"mean_class_accuracy": float(np.mean(accuracies)) if occurs.any() else float("nan")}


METRICS.add("mean_class_accuracy")(MeanClassAccuracy())
