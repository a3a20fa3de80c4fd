"""Binary cross-entropy: each class is a question of its own, and an example may be of several."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from jaxddp.config import Config
from jaxddp.registry import LOSSES


def binary_cross_entropy(
    label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The loss of each example, the mean over its classes: (logits float[B, K], labels) -> float[B].

    Labels are int32[B], one class each, or multi-hot, [B, K]. A mean over classes, and no sum, is what timm takes,
    in the recipes of "ResNet strikes back" (arXiv:2110.00476) too. It is linear in the targets, so that of mixed images
    the mix of the losses is the loss of the mixed targets; timm's `target_threshold` would not be, and is not here.

    Args:
        label_smoothing: of one label, the share that all classes divide, as timm has it; multi-hot targets move by half
            of it towards one half, as in Keras.
        class_weights: K numbers that multiply the terms of their classes, PyTorch's `weight`: nothing divides by them.
    """

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        one = labels.ndim == 1
        targets = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype) if one else labels.astype(logits.dtype)
        if label_smoothing:
            share = label_smoothing / (logits.shape[-1] if one else 2)
            targets = (1 - label_smoothing) * targets + share
        terms = optax.sigmoid_binary_cross_entropy(logits, targets)
        return (terms if class_weights is None else terms * jnp.asarray(class_weights, terms.dtype)).mean(-1)

    return loss


sigmoid_cross_entropy = binary_cross_entropy()
"""The usual loss where an image may have several labels: (logits float[B, K], labels float[B, K]) -> float[B]."""


@LOSSES.add("bce")
def bce_of(config: Config, class_weights: Sequence[float] | None = None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """By `train.label_smoothing`."""
    return binary_cross_entropy(config.train.label_smoothing, class_weights)
