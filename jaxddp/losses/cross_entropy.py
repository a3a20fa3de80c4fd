"""Softmax cross-entropy with integer labels."""

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
    """Return a loss (logits float[B, K], labels int32[B]) -> float[B].

    Args:
        label_smoothing: the share of each label that is spread over all classes (Szegedy et al. 2016,
            arXiv:1512.00567, section 7).
        class_weights: K weights of the classes. With weights the loss returns a pair of sums; see
            `negative_log_likelihood`.
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
"""The default loss: (logits float[B, K], labels int32[B]) -> float[B]."""


@LOSSES.add("cross_entropy")
def cross_entropy_of(
    config: Config, class_weights: Sequence[float] | None = None
) -> Callable[[jax.Array, jax.Array], Any]:
    """Create the loss with `train.label_smoothing`."""
    return cross_entropy(config.train.label_smoothing, class_weights)
