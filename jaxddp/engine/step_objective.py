"""What is minimized and what is measured, as sums and weights: division happens once, over the global batch."""

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
from jaxddp.engine.set_metrics import SetMetric, is_set_metric, measured
from jaxddp.models.interface import Model, takes_example_keys

Metric = Callable[[jax.Array, jax.Array], jax.Array]
"""(logits float[B, K], labels int32[B], or float[B, K] where there may be several) -> float[B]."""

SUBSTITUTED = "substituted"
"""The share of images that were substituted by others; measured where the batch says which."""

_EXAMPLES = 0x657861


class MetricSums(flax.struct.PyTreeNode):
    """Sums of per-example metrics: `values[i]` is (sum, weight) of `names[i]`, and the last row (examples, 1).

    Two of them add up by adding `values`. The weight of a metric is the number of examples; of a loss that weighs its
    examples the sum of their weights; of a scalar that belongs to a step, 1. `sets` is what the examples contribute to
    metrics over a whole set, by name; see `jaxddp.engine.set_metrics`.
    """

    values: jax.Array
    names: tuple[str, ...] = flax.struct.field(pytree_node=False)
    sets: Mapping[str, Any] = flax.struct.field(default_factory=dict)

    def means(self) -> dict[str, float]:
        """Each metric's mean over the examples that were counted, in float64; NaN where none was."""
        values = jax.device_get(self.values).astype("float64")
        return means_of(self.names, values)

    def first(self) -> jax.Array:
        """The first metric's mean, the loss of an objective, on the devices: float[], and 0 where nothing counts."""
        total, weight = self.values[0]
        return total / jnp.maximum(weight, jnp.finfo(weight.dtype).tiny)

    def count(self) -> int:
        """How many examples the sums are over."""
        return int(jax.device_get(self.values)[-1, 0])

    def with_scalars(self, scalars: Mapping[str, jax.Array]) -> "MetricSums":
        """The same with the scalars of one step beside the metrics."""
        if not scalars:
            return self
        rows = [
            jnp.stack([value.astype(self.values.dtype), jnp.ones((), self.values.dtype)]) for value in scalars.values()
        ]
        values = jnp.concatenate([self.values[:-1], jnp.stack(rows), self.values[-1:]])
        return MetricSums(values, (*self.names, *scalars))


def means_of(names: tuple[str, ...], values: Any) -> dict[str, float]:
    """The means that float64[names + 1, 2] sums stand for."""
    return {
        name: float(total) / float(weight) if weight else float("nan")
        for name, (total, weight) in zip(names, values[:-1], strict=True)
    }


class TrainObjective(Protocol):
    """What a step minimizes: the first of its sums, over their weight.

    It sums over whatever slice of the batch it is given; averaging over devices is the step's business. It may draw
    from several sources and ask several networks, and is called as `Objective` is.
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
    """A model, its input and its loss as one function of the parameters.

    Calling it sums over whatever slice of the batch it is given; averaging over devices is the step's business. The
    loss is the first of the sums' names. Evaluation classifies an image by its `views`, and alone measures those of the
    metrics that are of a whole set.
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
        """Sums over this device's slice of the batch, and the new model state.

        `key` is the model's, for this step on this device; `image_key` the run's, of which augmentation (`Preprocess`)
        and the keys of examples (`Model.apply`) are made.
        """
        images, mixing = self.preprocess(batch, train=train, key=image_key)
        keys = {"key": key, "image_key": image_key}
        logits, model_state = self.logits(params, model_state, images, batch, train=train, **keys)
        sums = self.sums(self.columns(logits, batch, mixing), batch)
        if not train:
            sums = sums.replace(sets=measured(self.metrics, logits, targets(batch.label, logits), batch.mask))
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
        """float[B, K], in float32 or wider, of a batch's images as `preprocess` made them, and the new model state."""
        if train:
            # Others are traced as if there were no such keys.
            own = {"example_keys": example_keys(batch, image_key)} if takes_example_keys(self.model) else {}
            logits, model_state = self.model.apply(params, model_state, images, train=True, key=key, **own)
        else:
            logits = self.predict(params, model_state, images)
        return wide_logits(logits, (len(images), self.loss.labels.num_classes)), model_state

    def columns(self, logits: jax.Array, batch: Batch, mixing: Mixing | None) -> list[tuple[jax.Array, jax.Array]]:
        """The loss, then each metric, as the value and the weight of each example, float[B] each."""
        columns = self._columns(logits, batch.label)
        if mixing is not None:
            others, share = self._columns(logits, mixing.label), mixing.weight.astype(logits.dtype)
            columns = jax.tree.map(lambda own, other: share * own + (1 - share) * other, columns, others)
        return columns

    def sums(self, columns: Sequence[tuple[jax.Array, jax.Array]], batch: Batch) -> MetricSums:
        """Over a batch's unmasked examples, of what `columns` gives."""
        dtype = columns[0][0].dtype
        names, ones = ("loss", *self._of_examples), jnp.ones(batch.mask.shape, dtype)
        if batch.substituted is not None:
            columns, names = [*columns, (batch.substituted.astype(dtype), ones)], (*names, SUBSTITUTED)
        columns = [*columns, (ones, ones)]

        def total(column: jax.Array) -> jax.Array:
            # A padded example may hold anything, so it is selected away: 0 * NaN would still be NaN.
            return jnp.where(batch.mask > 0, column * batch.mask, 0).sum()

        rows = [jnp.stack([total(values), total(weights)]) for values, weights in columns]
        return MetricSums(jnp.stack(rows), names)

    def predict(self, params: Any, model_state: Any, images: jax.Array) -> jax.Array:
        """The logits of evaluation, float[B, K], of normalized images [B, H, W, C]."""

        def classify(view: jax.Array) -> jax.Array:
            return self.model.apply(params, model_state, view, train=False, key=None)[0]

        return mean_logits(classify, images, self.views)

    @property
    def _of_examples(self) -> dict[str, Any]:
        return {name: metric for name, metric in self.metrics.items() if not is_set_metric(metric)}

    def _columns(self, logits: jax.Array, labels: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """The value and the weight of each example, float[B] each, loss first."""
        labels = targets(labels, logits)
        values, weights = self.loss(logits, labels)
        ones = jnp.ones(labels.shape[:1], logits.dtype)
        metrics = [(metric(logits, labels), ones) for metric in self._of_examples.values()]
        return [(values.astype(logits.dtype), weights.astype(logits.dtype)), *metrics]


def supervised(objective: Objective) -> TrainObjective:
    """The usual objective: the loss of the labels alone."""
    return objective


def example_keys(batch: Batch, key: jax.Array | None) -> jax.Array:
    """Random keys [B], as those of augmentation a function of (seed, epoch, row); of seed 0 where there is no key."""
    stream = jax.random.fold_in(jax.random.key(0) if key is None else key, _EXAMPLES)
    fold = jax.vmap(lambda epoch, row: jax.random.fold_in(jax.random.fold_in(stream, epoch), row))
    return fold(batch.epoch, batch.row)


def targets(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """Labels as losses and metrics take them: int32[B], or of the logits' dtype, [B, K]."""
    return labels if labels.ndim == 1 else labels.astype(logits.dtype)


def wide_logits(logits: Any, shape: tuple[int, int]) -> jax.Array:
    """What a model returned, in float32 or wider. Raises: InputError; it is something else than logits of a shape."""
    if getattr(logits, "shape", None) != shape or not jnp.issubdtype(logits.dtype, jnp.floating):
        other = f"an object of type {type(logits).__name__}"
        found = shaped(logits) if hasattr(logits, "shape") else other
        raise InputError(
            f"the model returned {found} for {counted(shape[0], 'image')}; return logits, float{list(shape)}"
        )
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
