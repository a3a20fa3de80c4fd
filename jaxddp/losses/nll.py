"""The negative log-likelihood of log-probabilities, which the network returns in place of logits."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.config import Config
from jaxddp.registry import LOSSES


def negative_log_likelihood(
    label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None
) -> Callable[[jax.Array, jax.Array], Any]:
    """Of log-probabilities float[B, K] and labels int32[B], the loss of each example, float[B].

    Args:
        label_smoothing: what all classes share of each label; see `jaxddp.losses.cross_entropy`.
        class_weights: K numbers above 0. The loss is then a pair: the sum of the weighted losses, in which a smoothed
            label's shares have their own classes' weights, and the sum of the labels' weights. Their quotient is
            PyTorch's `cross_entropy` with `weight` and `label_smoothing`.
    """

    def loss(log_probabilities: jax.Array, labels: jax.Array) -> Any:
        if class_weights is None:
            return _terms(log_probabilities, labels, label_smoothing)
        weights = jnp.asarray(class_weights, log_probabilities.dtype)
        values = _terms(log_probabilities * weights, labels, label_smoothing)
        return values.sum(), weights[labels].sum()

    return loss


def _terms(log_probabilities: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
    own = -jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)[:, 0]
    return (1 - smoothing) * own - smoothing * log_probabilities.mean(-1) if smoothing else own


@LOSSES.add("nll")
def nll_of(config: Config, class_weights: Sequence[float] | None = None) -> Callable[[jax.Array, jax.Array], Any]:
    """By `train.label_smoothing`."""
    return negative_log_likelihood(config.train.label_smoothing, class_weights)
