"""What is minimized and what is measured, as sums and counts: division happens once, over the global batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxddp.augment.preprocess import Preprocess
from jaxddp.data.batch import Batch
from jaxddp.models.adapt import Model

Loss = Callable[[jax.Array, jax.Array], jax.Array]
"""(logits float[B, K], labels int32[B]) -> float[B], or their mean as float[]."""
Metric = Callable[[jax.Array, jax.Array], jax.Array]
"""(logits float[B, K], labels int32[B]) -> float[B]."""

SUBSTITUTED = "substituted"
"""The share of images that others stand in for; measured where the batch says which."""


class MetricSums(flax.struct.PyTreeNode):
    """Sums of per-example figures: `values[i]` is (sum, count) of `names[i]`. Two of them add up by adding `values`."""

    values: jax.Array
    names: tuple[str, ...] = flax.struct.field(pytree_node=False)

    def means(self) -> dict[str, float]:
        """Each figure's mean over the examples that were counted, in float64; NaN where none was."""
        return {
            name: float(total) / float(count) if count else float("nan")
            for name, (total, count) in zip(self.names, jax.device_get(self.values).astype("float64"), strict=True)
        }


def cross_entropy(label_smoothing: float = 0.0) -> Loss:
    """Softmax cross-entropy of integer labels, smoothed as in Szegedy et al. 2016 (arXiv:1512.00567, section 7)."""

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        if not label_smoothing:
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype), label_smoothing)
        return optax.softmax_cross_entropy(logits, targets)

    return loss


def top_k(k: int) -> Metric:
    """1 where the label is among the k largest logits, of equal ones the first, else 0. A NaN is never right."""

    def metric(logits: jax.Array, labels: jax.Array) -> jax.Array:
        own = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        earlier = jnp.arange(logits.shape[-1]) < labels[:, None]
        ahead = jnp.where(earlier, ~(logits < own), ~(logits <= own))
        return (ahead.sum(-1) < k).astype(jnp.float32)

    return metric


def top_k_metrics(num_classes: int, ks: tuple[int, ...] = (1, 5)) -> dict[str, Metric]:
    """`top1`, and `top5` where there are more than five classes."""
    return {f"top{k}": top_k(k) for k in ks if k == 1 or k < num_classes}


@dataclass(frozen=True)
class Objective:
    """A model, its input and its loss as one function of the parameters.

    Where images are mixed, loss and metrics of an example are those of its two labels, weighed as the images are.

    Attributes:
        loss: any function of (logits, labels). One that returns the mean over a batch is taken apart again into
            the losses of its examples, so that padding can be left out and batches of any split add up exactly.
        metrics: further figures to measure, by name.
    """

    model: Model
    loss: Loss
    preprocess: Preprocess
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return ("loss", *self.metrics)

    def __call__(
        self, params: Any, model_state: Any, batch: Batch, *, train: bool, key: jax.Array | None = None
    ) -> tuple[MetricSums, Any]:
        """Sums over this device's slice of the batch, and the new model state."""
        images, mixing = self.preprocess(batch, train=train)
        logits, model_state = self.model.apply(params, model_state, images, train=train, key=key)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        columns = self._columns(logits, batch.label)
        if mixing is not None:
            others, weight = self._columns(logits, mixing.label), mixing.weight.astype(logits.dtype)
            columns = [weight * own + (1 - weight) * other for own, other in zip(columns, others, strict=True)]
        names = self.names
        if batch.substituted is not None:
            columns, names = [*columns, batch.substituted.astype(logits.dtype)], (*names, SUBSTITUTED)
        # A padded example may hold anything, so it is selected away: 0 * NaN would still be NaN.
        sums = [jnp.where(batch.mask > 0, column * batch.mask, 0).sum() for column in columns]
        count = batch.mask.sum()
        return MetricSums(jnp.stack([jnp.stack([s, count.astype(s.dtype)]) for s in sums]), names), model_state

    def _columns(self, logits: jax.Array, labels: jax.Array) -> list[jax.Array]:
        """Each figure of each example, float[B], in the order of `names`."""
        return [_per_example(self.loss, logits, labels), *(m(logits, labels) for m in self.metrics.values())]


def _per_example(loss: Loss, logits: jax.Array, labels: jax.Array) -> jax.Array:
    if jax.eval_shape(loss, logits, labels).ndim:
        return loss(logits, labels)
    return jax.vmap(lambda one, label: loss(one[None], label[None]))(logits, labels)
