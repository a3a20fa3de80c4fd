"""Negative log-likelihood, for networks that return log-probabilities instead of logits."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.config import Config
from jaxddp.registry import LOSSES


def negative_log_likelihood(
    label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None
) -> Callable[[jax.Array, jax.Array], Any]:
    """Return a loss (log-probabilities float[B, K], labels int32[B]) -> float[B].

    Args:
        label_smoothing: the share of each label that is spread over all classes; see `jaxddp.losses.cross_entropy`.
        class_weights: K numbers above 0. With weights the loss returns a pair: the sum of the weighted losses, and the
            sum of the labels' weights. In a smoothed label, the share of each class has the weight of that class. The
            quotient of the two sums is PyTorch's `cross_entropy` with `weight` and `label_smoothing`.
    """

    def loss(log_probabilities: jax.Array, labels: jax.Array) -> Any:
        if class_weights is None:
            return _terms(log_probabilities, labels, label_smoothing)
        weights = jnp.asarray(class_weights, log_probabilities.dtype)
        values = _terms(log_probabilities * weights, labels, label_smoothing)
        return values.sum(), weights[labels].sum()

    return loss


def _terms(log_probabilities: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
    label_loss = -jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)[:, 0]
    return (1 - smoothing) * label_loss - smoothing * log_probabilities.mean(-1) if smoothing else label_loss


@LOSSES.add("nll")
def nll_of(config: Config, class_weights: Sequence[float] | None = None) -> Callable[[jax.Array, jax.Array], Any]:
    """Create the loss with `train.label_smoothing`."""
    return negative_log_likelihood(config.train.label_smoothing, class_weights)
