"""Softmax cross-entropy of integer labels."""

from collections.abc import Callable

import jax
import optax

from jaxddp.registry import LOSSES


def cross_entropy(label_smoothing: float = 0.0) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The loss of each example, (logits float[B, K], labels int32[B]) -> float[B].

    All classes divide a share of each label (Szegedy et al. 2016, arXiv:1512.00567, section 7).
    """

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        if not label_smoothing:
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype), label_smoothing)
        return optax.softmax_cross_entropy(logits, targets)

    return loss


softmax_cross_entropy = cross_entropy()
"""The usual loss: (logits float[B, K], labels int32[B]) -> float[B]."""

LOSSES.add("cross_entropy")(lambda config: cross_entropy(config.train.label_smoothing))
