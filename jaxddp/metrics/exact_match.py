"""The share of examples all of whose labels are right."""

import jax
import jax.numpy as jnp

from jaxddp.registry import METRICS


class ExactMatch:
    """1 where the classes with positive logits are just those of the example, else 0: accuracy of several labels.

    Called with (logits float[B, K], labels float[B, K]), it returns float32[B].
    """

    takes_one, takes_several = False, True

    def __call__(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        return ((logits > 0) == (labels > 0.5)).all(-1).astype(jnp.float32)


METRICS.add("exact_match")(ExactMatch())
