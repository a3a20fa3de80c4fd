"""The confusion matrix of a validation, which makes no number but can be written down."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.registry import METRICS


class ConfusionMatrix:
    """How many examples of each class were taken for each class; one with a logit that is not finite has no part."""

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
        """int32[K, K]: labels in rows, the largest logits in columns; of equal ones the first. See `SumsMetric`."""
        classes = logits.shape[-1]
        counts = (mask > 0) & jnp.isfinite(logits).all(-1)
        return jnp.zeros((classes, classes), jnp.int32).at[labels, logits.argmax(-1)].add(counts.astype(jnp.int32))

    def finish(self, found: Any) -> Mapping[str, float]:
        return {}


METRICS.add("confusion")(ConfusionMatrix())
