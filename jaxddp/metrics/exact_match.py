"""The share of examples with all labels right."""

import jax
import jax.numpy as jnp

from jaxddp.registry import METRICS


class ExactMatch:
    """Exact match for several labels: 1 if the classes with positive logits are exactly the example's labels, else 0.

    A call takes logits float[B, K] and labels float[B, K], and returns float32[B].
    """

    takes_one, takes_several = False, True

    def __call__(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        return ((logits > 0) == (labels > 0.5)).all(-1).astype(jnp.float32)


METRICS.add("exact_match")(ExactMatch())
