"""Top-k accuracy."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxddp.registry import METRICS


@dataclass(frozen=True)
class TopK:
    """Top-k accuracy: 1 if the label is among the k largest logits, else 0.

    The first of equal logits counts as the largest. If the label's logit is NaN, the result is 0. A call takes logits
    float[B, K] and labels int32[B], and returns float32[B].
    """

    k: int

    @property
    def min_classes(self) -> int:
        """Return the least number of classes for which this metric is measured.

        With fewer classes the metric would always be 1. Top-1 is measured for any number of classes.
        """
        return 1 if self.k == 1 else self.k + 1

    def __call__(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        label_logit = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        earlier = jnp.arange(logits.shape[-1]) < labels[:, None]
        is_larger = jnp.where(earlier, ~(logits < label_logit), ~(logits <= label_logit))
        return (is_larger.sum(-1) < self.k).astype(jnp.float32)


METRICS.add("top1")(TopK(1))
METRICS.add("top5")(TopK(5))
METRICS.add("top10")(TopK(10))
