"""Top-k accuracy."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxddp.registry import METRICS


@dataclass(frozen=True)
class TopK:
    """1 where the label is among the k largest logits, else 0. Of equal logits the first counts as the larger.

    A NaN is never right. Called with (logits float[B, K], labels int32[B]), it returns float32[B].
    """

    k: int

    @property
    def min_classes(self) -> int:
        """With fewer classes than this the metric is 1 for every model, and says nothing; top-1 is always measured."""
        return 1 if self.k == 1 else self.k + 1

    def __call__(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        own = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        earlier = jnp.arange(logits.shape[-1]) < labels[:, None]
        ahead = jnp.where(earlier, ~(logits < own), ~(logits <= own))
        return (ahead.sum(-1) < self.k).astype(jnp.float32)


for k in (1, 5, 10):
    METRICS.add(f"top{k}")(TopK(k))
