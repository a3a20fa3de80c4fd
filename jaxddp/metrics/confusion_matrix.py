"""The confusion matrix of a validation. It can be written to a file, and gives no number to log."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.registry import METRICS


class ConfusionMatrix:
    """Counts of examples by label and by prediction. An example with a logit that is not finite is excluded."""

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
        """Return int32[K, K]: labels in rows, predictions in columns; see `SumsMetric`.

        The prediction is the class with the largest logit. Of equal logits the first one counts.
        """
        classes = logits.shape[-1]
        counts = (mask > 0) & jnp.isfinite(logits).all(-1)
        return jnp.zeros((classes, classes), jnp.int32).at[labels, logits.argmax(-1)].add(counts.astype(jnp.int32))

    def finish(self, found: Any) -> Mapping[str, float]:
        return {}


METRICS.add("confusion")(ConfusionMatrix())
