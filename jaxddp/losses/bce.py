"""Binary cross-entropy: each class is a separate binary decision, so an example may have several labels."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from jaxddp.config import Config
from jaxddp.registry import LOSSES


def binary_cross_entropy(
    label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a loss (logits float[B, K], labels) -> float[B]: the mean over the classes for each example.

    Labels are int32[B], one class each, or multi-hot, [B, K]. timm also takes the mean over the classes, as in the
    recipes of "ResNet strikes back" (arXiv:2110.00476). The loss is linear in the targets, so for mixed images the
    mix of the losses is the loss of the mixed targets. timm's `target_threshold` is not linear and is not supported.

    Args:
        label_smoothing: with one label, the share of the label that is spread over all classes, as in timm. With
            multi-hot labels, the share by which targets move towards one half, as in Keras.
        class_weights: K numbers that multiply the terms of their classes, without normalization, like PyTorch's
            `weight`.
    """

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        is_single = labels.ndim == 1
        targets = (
            jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype) if is_single else labels.astype(logits.dtype)
        )
        if label_smoothing:
            share = label_smoothing / (logits.shape[-1] if is_single else 2)
            targets = (1 - label_smoothing) * targets + share
        terms = optax.sigmoid_binary_cross_entropy(logits, targets)
        return (terms if class_weights is None else terms * jnp.asarray(class_weights, terms.dtype)).mean(-1)

    return loss


sigmoid_cross_entropy = binary_cross_entropy()
"""The default loss if an image may have several labels: (logits float[B, K], labels float[B, K]) -> float[B]."""


@LOSSES.add("bce")
def bce_of(config: Config, class_weights: Sequence[float] | None = None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Create the loss with `train.label_smoothing`."""
    return binary_cross_entropy(config.train.label_smoothing, class_weights)
