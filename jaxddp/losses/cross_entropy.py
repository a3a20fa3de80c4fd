"""Softmax cross-entropy of integer labels."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from jaxddp.config import Config
from jaxddp.losses.nll import negative_log_likelihood
from jaxddp.registry import LOSSES


def cross_entropy(
    label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None
) -> Callable[[jax.Array, jax.Array], Any]:
    """The loss of each example, (logits float[B, K], labels int32[B]) -> float[B].

    All classes divide a share of each label (Szegedy et al. 2016, arXiv:1512.00567, section 7). With K weights of
    classes it is a pair of sums instead; see `negative_log_likelihood`.
    """
    weighted = negative_log_likelihood(label_smoothing, class_weights)

    def loss(logits: jax.Array, labels: jax.Array) -> Any:
        if class_weights is not None:
            return weighted(jax.nn.log_softmax(logits), labels)
        if not label_smoothing:
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype), label_smoothing)
        return optax.softmax_cross_entropy(logits, targets)

    return loss


softmax_cross_entropy = cross_entropy()
"""The usual loss: (logits float[B, K], labels int32[B]) -> float[B]."""


@LOSSES.add("cross_entropy")
def cross_entropy_of(
    config: Config, class_weights: Sequence[float] | None = None
) -> Callable[[jax.Array, jax.Array], Any]:
    """By `train.label_smoothing`."""
    return cross_entropy(config.train.label_smoothing, class_weights)
