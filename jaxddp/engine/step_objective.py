"""Training objectives, which return sums and weights of the loss and the metrics. The step computes means from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from jaxddp.augment.mixing import Mixing
from jaxddp.augment.preprocess import Preprocess
from jaxddp.augment.views import mean_logits
from jaxddp.config import Views
from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted, shaped
from jaxddp.data.batch import Batch
from jaxddp.engine.example_loss import ExampleLoss
from jaxddp.engine.set_metrics import SetMetric, compute_contributions, is_set_metric
from jaxddp.models.interface import Model, takes_example_keys

Metric = Callable[[jax.Array, jax.Array], jax.Array]
"""(logits float[B, K], labels) -> float[B]. Labels are int32[B], or float[B, K] if examples may have several labels."""

SUBSTITUTED = "substituted"
"""The name of the metric for the share of substituted images. It is measured if the batch marks substituted images."""

_EXAMPLES = 0x657861


class MetricSums(flax.struct.PyTreeNode):
    """Sums of per-example metrics.

    Attributes:
        values: float[metrics + 1, 2]. Row i is (sum, weight) of `names[i]`, and the last row is (number of examples,
        1).
            The weight is the number of examples for a metric, the sum of the examples' weights for a weighted loss, and
            1 for a scalar of a step. The `values` of two batches add up to the `values` of their union.
        names: the names of all rows except the last.
        sets: the contributions to metrics over a whole set, by name; see `jaxddp.engine.set_metrics`.
    """

    values: jax.Array
    names: tuple[str, ...] = flax.struct.field(pytree_node=False)
    sets: Mapping[str, Any] = flax.struct.field(default_factory=dict)

    def means(self) -> dict[str, float]:
        """Return each metric's mean over the unmasked examples, in float64. It is NaN if the weight is 0."""
        values = jax.device_get(self.values).astype("float64")
        return means_of(self.names, values)

    def mean_loss(self) -> jax.Array:
        """Return the mean loss, the first metric, as an array: float[], 0 if the weight is 0."""
        total, weight = self.values[0]
        return total / jnp.maximum(weight, jnp.finfo(weight.dtype).tiny)

    def count(self) -> int:
        """Return the number of unmasked examples."""
        return int(jax.device_get(self.values)[-1, 0])

    def with_scalars(self, scalars: Mapping[str, jax.Array]) -> "MetricSums":
        """Return these sums with additional scalars of one step."""
        if not scalars:
            return self
        rows = [
            jnp.stack([value.astype(self.values.dtype), jnp.ones((), self.values.dtype)]) for value in scalars.values()
        ]
        values = jnp.concatenate([self.values[:-1], jnp.stack(rows), self.values[-1:]])
        return MetricSums(values, (*self.names, *scalars))


def means_of(names: tuple[str, ...], values: Any) -> dict[str, float]:
    """Compute the means from sums, float64[names + 1, 2]."""
    return {
        name: float(total) / float(weight) if weight else float("nan")
        for name, (total, weight) in zip(names, values[:-1], strict=True)
    }


class TrainObjective(Protocol):
    """A training objective. A step minimizes the first of its sums, divided by the weight of that sum.

    An objective sums over its slice of the batch; the step averages over devices. An objective may use several data
    sources and several networks. Its arguments are those of `Objective`.
    """

    def __call__(
        self,
        params: Any,
        model_state: Any,
        batch: Batch,
        *,
        train: bool,
        key: jax.Array | None = None,
        image_key: jax.Array | None = None,
    ) -> tuple[MetricSums, Any]: ...


@dataclass(frozen=True)
class Objective:
    """A model, its preprocessing and its loss as one function of the parameters.

    A call sums over a slice of the batch; the step averages over devices. The loss is the first of the sums. Evaluation
    averages the logits of an image over the image's `views`. Metrics over a whole set are measured only in evaluation.
    """

    model: Model
    loss: ExampleLoss
    preprocess: Preprocess
    metrics: Mapping[str, Metric | SetMetric] = field(default_factory=dict)
    views: Views = "one"

    def __call__(
        self,
        params: Any,
        model_state: Any,
        batch: Batch,
        *,
        train: bool,
        key: jax.Array | None = None,
        image_key: jax.Array | None = None,
    ) -> tuple[MetricSums, Any]:
        """Return the sums over this device's slice of the batch and the new model state.

        Args:
            key: the model's random key, for this step on this device.
            image_key: the run's random key, from which the keys of augmentation (`Preprocess`) and of examples
                (`Model.apply`) are derived.
        """
        images, mixing = self.preprocess(batch, train=train, key=image_key)
        keys = {"key": key, "image_key": image_key}
        logits, model_state = self.logits(params, model_state, images, batch, train=train, **keys)
        sums = self.sums(self.columns(logits, batch, mixing), batch)
        if not train:
            sums = sums.replace(
                sets=compute_contributions(self.metrics, logits, targets(batch.label, logits), batch.mask)
            )
        return sums, model_state

    def logits(
        self,
        params: Any,
        model_state: Any,
        images: jax.Array,
        batch: Batch,
        *,
        train: bool,
        key: jax.Array | None,
        image_key: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        """Return the logits, float[B, K] in float32 or wider, of preprocessed images, and the new model state."""
        if train:
            # The program computes the keys only for models that take them.
            keys = {"example_keys": example_keys(batch, image_key)} if takes_example_keys(self.model) else {}
            logits, model_state = self.model.apply(params, model_state, images, train=True, key=key, **keys)
        else:
            logits = self.predict(params, model_state, images)
        return wide_logits(logits, (len(images), self.loss.labels.num_classes)), model_state

    def columns(self, logits: jax.Array, batch: Batch, mixing: Mixing | None) -> list[tuple[jax.Array, jax.Array]]:
        """Return the value and the weight of each example, float[B] each, for the loss and then for each metric."""
        columns = self._columns(logits, batch.label)
        if mixing is not None:
            mixed_columns, share = self._columns(logits, mixing.label), mixing.weight.astype(logits.dtype)
            columns = jax.tree.map(lambda one, other: share * one + (1 - share) * other, columns, mixed_columns)
        return columns

    def sums(self, columns: Sequence[tuple[jax.Array, jax.Array]], batch: Batch) -> MetricSums:
        """Sum the result of `columns` over a batch's unmasked examples."""
        dtype = columns[0][0].dtype
        names, ones = ("loss", *self._example_metrics), jnp.ones(batch.mask.shape, dtype)
        if batch.substituted is not None:
            columns, names = [*columns, (batch.substituted.astype(dtype), ones)], (*names, SUBSTITUTED)
        columns = [*columns, (ones, ones)]

        def total(column: jax.Array) -> jax.Array:
            # The value of a padded example may be NaN, and 0 * NaN is NaN. So the value is replaced by 0.
            return jnp.where(batch.mask > 0, column * batch.mask, 0).sum()

        rows = [jnp.stack([total(values), total(weights)]) for values, weights in columns]
        return MetricSums(jnp.stack(rows), names)

    def predict(self, params: Any, model_state: Any, images: jax.Array) -> jax.Array:
        """Return the logits, float[B, K], of normalized images [B, H, W, C] in evaluation."""

        def classify(view: jax.Array) -> jax.Array:
            return self.model.apply(params, model_state, view, train=False, key=None)[0]

        return mean_logits(classify, images, self.views)

    @property
    def _example_metrics(self) -> dict[str, Any]:
        return {name: metric for name, metric in self.metrics.items() if not is_set_metric(metric)}

    def _columns(self, logits: jax.Array, labels: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Return the value and the weight of each example, float[B] each, with the loss first."""
        labels = targets(labels, logits)
        values, weights = self.loss(logits, labels)
        ones = jnp.ones(labels.shape[:1], logits.dtype)
        metrics = [(metric(logits, labels), ones) for metric in self._example_metrics.values()]
        return [(values.astype(logits.dtype), weights.astype(logits.dtype)), *metrics]


def supervised(objective: Objective) -> TrainObjective:
    """Return the objective unchanged: supervised learning minimizes the loss of the labels."""
    return objective


def example_keys(batch: Batch, key: jax.Array | None) -> jax.Array:
    """Return random keys [B] that depend only on the seed, the epoch and the row, like the keys of augmentation.

    Without a `key`, the key of seed 0 is used.
    """
    stream = jax.random.fold_in(jax.random.key(0) if key is None else key, _EXAMPLES)
    fold = jax.vmap(lambda epoch, row: jax.random.fold_in(jax.random.fold_in(stream, epoch), row))
    return fold(batch.epoch, batch.row)


def targets(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """Return the labels for losses and metrics: int32[B], or [B, K] in the dtype of the logits."""
    return labels if labels.ndim == 1 else labels.astype(logits.dtype)


def wide_logits(logits: Any, shape: tuple[int, int]) -> jax.Array:
    """Return a model's logits in float32 or wider. Raises: InputError if the shape or the dtype is wrong."""
    if getattr(logits, "shape", None) != shape or not jnp.issubdtype(logits.dtype, jnp.floating):
        result = shaped(logits) if hasattr(logits, "shape") else f"an object of type {type(logits).__name__}"
        raise InputError(
            f"the model returned {result} for {counted(shape[0], 'image')}; return logits, float{list(shape)}"
        )
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
