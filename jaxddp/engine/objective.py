"""Training objectives and metrics, which return sums and weights of a batch. The step computes means from them.

A loss of any accepted form is converted to a value and a weight for each example. So the loss of a batch is the same
for any padding and any division of the batch among devices.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.augment.mixing import Mixing, partners
from jaxddp.core.errors import InputError, Words, counted, kind_of, shaped
from jaxddp.core.user_code import errors_name_call
from jaxddp.data.batch import Batch
from jaxddp.data.source import LabelKind, float_labels
from jaxddp.mesh import AXIS, stack_over_devices
from jaxddp.models.interface import Model, as_wide, takes_example_keys
from jaxddp.models.remat import Remat, rematerialized

if TYPE_CHECKING:
    from jaxddp.augment.preprocess import Preprocess
    from jaxddp.config.tree import Views


Loss = Callable[[jax.Array, jax.Array], Any]
"""(logits float[B, K], labels int32[B]) -> the loss of each example, float[B]; or the mean of these losses, float[]; or
a pair (sum, weight). For pairs, training minimizes the sum over the global batch divided by the weight of the global
batch, as for a loss with class weights. Labels of other forms are float[B, K]; see `jaxddp.data.source.LabelForm`."""

LossForm = Literal["examples", "mean", "weighted"]
"""The form of a loss: one loss for each example, the mean of these losses, or (sum, weight)."""

_ACCEPTED = "return one loss per example (float[B]), their mean (float[]), or (sum, weight)"
_ACCEPTED_METRIC = "return one number for each example, float[B]"
# The smallest and the largest batch that a loss is tried on. Both are odd, because an odd number seldom equals the
# number of classes. So the axis of examples differs from the axis of classes.
_FEWEST, _MOST = 9, 255


@dataclass(frozen=True)
class ExampleLoss:
    """A loss as values and weights: the loss of the global batch is sum(values) / sum(weights).

    Attributes:
        function: the user's loss function.
        form: the form of the result of `function`.
        labels: the kind of labels that `function` takes.
    """

    function: Loss
    form: LossForm
    labels: LabelKind

    def __call__(self, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (values, weights), float[B] each."""
        if self.form == "weighted":
            return jax.vmap(lambda logit, label: _scalars(self.function(logit[None], label[None])))(logits, labels)
        if self.form == "mean":
            values = jax.vmap(lambda logit, label: self.function(logit[None], label[None]))(logits, labels)
        else:
            values = self.function(logits, labels)
        return values, jnp.ones_like(values)


def example_loss(loss: Loss, labels: LabelKind) -> ExampleLoss:
    """Find the form of a loss, and check the loss on random logits with every class among the labels.

    Raises:
        InputError: the result has no form in `LossForm`; or the loss of a batch does not follow from the losses of its
            examples, so its value would depend on the division of a batch among devices.
    """
    name = f"loss {getattr(loss, '__qualname__', type(loss).__name__)}" if callable(loss) else "loss"
    one_hot = ", or, if each image has one label, give labels.argmax(1)" if labels.form == "several labels" else ""
    check_form(loss, name, labels, f"give another{one_hot}")
    form, dtype = _form(loss, name, labels, _ACCEPTED)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(f"{name}: returned {dtype}, which has no gradient; {_ACCEPTED}")
    converted = ExampleLoss(loss, form, labels)

    @jax.jit
    def evaluate(logits: jax.Array, labels: jax.Array) -> tuple[Any, Any, Any]:
        values, weights = (_of_one(loss, converted.labels) if form == "examples" else converted)(logits, labels)
        batched = loss(logits, labels)
        if form != "weighted":
            return batched, values if form == "examples" else values.mean(), jnp.zeros(())
        weight_gradient = jax.grad(lambda logits: _scalars(loss(logits, labels))[1].astype(jnp.float32))(logits)
        return jnp.stack(_scalars(batched)), jnp.stack([values.sum(), weights.sum()]), jnp.abs(weight_gradient).max()

    for logits, batch_labels in jax.device_put([*random_batches(labels)]):
        batched, alone, weight_gradient = jax.device_get(evaluate(logits, batch_labels))
        if not np.isfinite(batched).all():
            # A loss for a model that ends with a softmax takes probabilities.
            batched, alone, weight_gradient = jax.device_get(evaluate(jax.nn.softmax(logits), batch_labels))
        # Another order of summation causes a relative error.
        tolerance = max(1e-5, 4 * float(jnp.finfo(batched.dtype).eps))
        what = {"examples": "an example's loss", "mean": "the mean loss", "weighted": "the sum or the weight"}[form]
        _check_alone(f"{name}: {what}", batched, alone, _ACCEPTED, tolerance, equal_nan=False)
        if weight_gradient > 0:
            raise InputError(f"{name}: its weight depends on the logits; compute it from the labels alone")
        if form == "weighted" and not batched[1] > 0:
            weight = f"its weight over a batch of all classes is {batched[1]:.6g}"
            raise InputError(f"{name}: {weight}; give positive weights")
    return converted


def check_metric(metric: Loss, name: str, labels: LabelKind) -> None:
    """Raise `InputError` if a metric does not return one number for each example that depends on this example alone."""
    check_form(metric, name, labels)
    form, _ = _form(metric, name, labels, _ACCEPTED_METRIC)
    if form != "examples":
        raise InputError(f"{name}: returned one number for a batch; return one for each example, float[B]")
    for batch in jax.device_put([*random_batches(labels)]):
        alone, _ = jax.jit(_of_one(metric, labels).__call__)(*batch)
        _check_alone(f"{name}: an example's value", jax.jit(metric)(*batch), alone, "compute it from the example alone")


def check_form(function: Any, where: Words, labels: LabelKind, advice: Words = "give another") -> None:
    """Raise `InputError` if a loss or a metric takes other labels: its attribute `takes` may name some `LabelForm`s."""
    takes = getattr(function, "takes", (labels.form,))
    if labels.form not in takes:
        problem = f" takes {' or '.join(takes)} per image, but the data have {labels.form}"
        raise InputError(where, problem, advice=advice)


def _of_one(function: Loss, labels: LabelKind) -> ExampleLoss:
    """Return a function with a value for each example as one that computes each value from the example alone."""
    return ExampleLoss(lambda logits, labels: function(logits, labels)[0], "mean", labels)


def _check_alone(
    what: str, of_batch: Any, of_parts: Any, advice: str, tolerance: float = 1e-4, *, equal_nan: bool = True
) -> None:
    """Raise `InputError` if numbers of a whole batch differ from those that its parts give, each computed alone."""
    whole, alone = (np.asarray(numbers, np.float64).ravel() for numbers in (of_batch, of_parts))
    if not np.allclose(whole, alone, rtol=tolerance, atol=tolerance, equal_nan=equal_nan):
        differences = np.abs(whole - alone)
        index = int(np.nanargmax(differences)) if np.isfinite(differences).any() else 0
        found = f"is {whole[index]:.6g} for a batch and {alone[index]:.6g} if its parts are computed alone"
        raise InputError(f"{what} {found}; {advice}")


def random_batches(labels: LabelKind) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield random batches (logits float32[B, K], labels) for checks. Every class occurs as a label.

    Numbers are 0 and 1, so that a loss may take some of them as classes.
    """
    rng, classes = np.random.default_rng(0), labels.num_classes
    rows = min(max(classes, _FEWEST), _MOST)
    every = np.resize(rng.permutation(classes), -(-max(classes, rows) // rows) * rows)
    for part in every.reshape(-1, rows):
        logits = 2 * rng.standard_normal((rows, classes), np.float32)
        if labels.form == "one label":
            yield logits, part.astype(np.int32)
            continue
        one_hot, more = np.arange(classes) == part[:, None], rng.random(logits.shape) < 0.2
        yield logits, float_labels((one_hot | more).astype(np.float32), labels.form)


def _form(loss: Loss, name: str, labels: LabelKind, accepted: str) -> tuple[LossForm, Any]:
    """Return the form of a loss or a metric and the dtype of its first result. Raises: InputError."""
    classes = labels.num_classes
    rows = _FEWEST if classes != _FEWEST else _FEWEST + 2
    logits = jax.ShapeDtypeStruct((rows, classes), jnp.float32)
    has_rows = labels.form != "one label"
    shapes = logits, logits if has_rows else jax.ShapeDtypeStruct((rows,), jnp.int32)
    label_type = f"float32[{rows}, {classes}], {labels.form} of an image" if has_rows else f"int32[{rows}]"
    arguments = f"logits float32[{rows}, {classes}] and labels {label_type}"
    if not callable(loss):
        raise InputError(f"{name}: {kind_of(loss)} was given; give a function of (logits, labels)")
    with errors_name_call(name, arguments):
        result = jax.eval_shape(loss, *shapes)
    parts = result if isinstance(result, tuple | list) else (result,)
    floats = all(hasattr(part, "dtype") and not jnp.issubdtype(part.dtype, jnp.complexfloating) for part in parts)
    kinds: dict[Any, LossForm] = {((rows,),): "examples", ((),): "mean", ((), ()): "weighted"}
    shape = tuple(part.shape for part in parts) if floats else None
    if shape not in kinds or (isinstance(result, tuple | list) and len(parts) == 1):
        types = ", ".join(f"{part.dtype}{list(part.shape)}" if hasattr(part, "dtype") else str(part) for part in parts)
        raise InputError(f"{name}: returned {types or 'nothing'} for {arguments}; {accepted}")
    return kinds[shape], parts[0].dtype


def _scalars(pair: Any) -> tuple[jax.Array, jax.Array]:
    total, weight = pair
    return jnp.asarray(total), jnp.asarray(weight).astype(jnp.result_type(total))


Metric = Callable[[jax.Array, jax.Array], jax.Array]
"""(logits float[B, K], labels) -> float[B]. Labels are those of a `Loss`."""

SUBSTITUTED = "substituted"
"""The name of the metric for the share of substituted images. It is measured if the batch marks substituted images."""

_EXAMPLES = 0x657861


class MetricSums(flax.struct.PyTreeNode):
    """Sums of per-example metrics.

    Attributes:
        values: float[metrics + 1, 2]. Row i is (sum, weight) of `names[i]`; the last row is (number of examples, 1).
            The weight is the number of examples for a metric, the sum of the examples' weights for a weighted loss, and
            1 for a scalar of a step. The `values` of two batches add up to the `values` of their union.
        names: the names of all rows except the last.
        sets: the contributions to metrics over a whole set, by name; see `jaxddp.engine.objective`.
    """

    values: jax.Array
    names: tuple[str, ...] = flax.struct.field(pytree_node=False)
    sets: Mapping[str, Any] = flax.struct.field(default_factory=dict)

    def means(self) -> dict[str, float]:
        """Return each metric's mean over the unmasked examples, in float64. It is NaN if the weight is 0."""
        values = jax.device_get(self.values).astype("float64")
        return means_of(dict(zip(self.names, values[:-1], strict=True)))

    def mean_loss(self) -> jax.Array:
        """Return the mean loss, the first metric, as an array: float[], 0 if the weight is 0."""
        total, weight = self.values[0]
        return total / jnp.maximum(weight, jnp.finfo(weight.dtype).tiny)

    def count(self) -> int:
        """Return the number of unmasked examples."""
        return int(jax.device_get(self.values)[-1, 0])

    def with_scalars(self, scalars: Mapping[str, jax.Array]) -> "MetricSums":
        """Return these sums with more scalars of one step. Raises: InputError for a wrong shape or a used name."""
        if not scalars:
            return self
        if wrong := [name for name, value in scalars.items() if jnp.ndim(value) or name in self.names]:
            raise InputError(f"the step reports {wrong[0]!r}", advice="report numbers, float[], under unused names")
        rows = jnp.array([[value, 1] for value in scalars.values()], self.values.dtype)
        values = jnp.concatenate([self.values[:-1], rows, self.values[-1:]])
        return MetricSums(values, (*self.names, *scalars))


def means_of(sums: Mapping[str, Any]) -> dict[str, float]:
    """Compute the means from pairs (sum, weight), float64[2], by name."""
    return {name: float(total) / float(weight) if weight else float("nan") for name, (total, weight) in sums.items()}


TrainObjective = Callable[..., tuple[MetricSums, Any]]
"""A training objective, with the arguments and the results of `Objective`. A step minimizes the first of its sums,
divided by the weight of that sum.

An objective sums over its slice of the batch; the step averages over devices. An objective may use several data sources
and several networks.
"""


class SumsMetric(Protocol):
    """A metric that is computed from sums over the examples, such as counts by class."""

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        """Return arrays that add up over the batches of a set.

        Args:
            logits: float[B, K]. The logits of padded examples are finite.
            mask: float[B], 0 for padded examples, which must not change the sums.
        """
        ...

    def finish(self, found: Any) -> Mapping[str, float]:
        """Return numbers by name. `found` is the sum over the set of the results of `sums`, as NumPy arrays."""
        ...


class ExamplesMetric(Protocol):
    """A metric that needs all examples at once. The host memory holds the results of `examples` for the whole set."""

    def examples(self, logits: jax.Array, labels: jax.Array) -> Any:
        """Return arrays of numbers, [B, …], from logits float[B, K] and labels."""
        ...

    def finish(self, found: Any) -> Mapping[str, float]:
        """Return numbers by name.

        Args:
            found: the result of `examples` for the whole set, as NumPy arrays [N, …] in the order of the set.
        """
        ...


SetMetric = SumsMetric | ExamplesMetric
"""A metric over a whole set of examples."""


@dataclass(frozen=True)
class Objective:
    """A model, its preprocessing and its loss as one function of the parameters.

    A call sums over a slice of the batch; the step averages over devices. The loss is the first of the sums. Evaluation
    averages the logits of an image over the image's `views`. Training keeps the activations that `remat` names. Metrics
    over a whole set are measured only in evaluation.
    """

    model: Model
    loss: ExampleLoss
    preprocess: "Preprocess"
    metrics: Mapping[str, Metric | SetMetric] = field(default_factory=dict)
    views: "Views" = "one"
    remat: Remat = "none"

    @property
    def program_key(self) -> Mapping[str, Any]:
        return vars(self)

    def __call__(
        self, params: Any, model_state: Any, batch: Batch, *, train: bool, key: Any = None, image_key: Any = None
    ) -> tuple[MetricSums, Any]:
        """Return the sums over this device's slice of the batch and the new model state.

        Args:
            key: the model's random key, for this step on this device.
            image_key: the run's random key, from which the keys of augmentation (`Preprocess`) and of examples
                (`Model.apply`) are derived.
        """
        images, mixing = self.preprocess(batch, train=train, key=image_key)
        logits, model_state = self.logits(params, model_state, images, [(batch, image_key)], train=train, key=key)
        sums = self.sums(self.columns(logits, batch, mixing), batch)
        if train:
            return sums, model_state
        sets = compute_contributions(self.metrics, logits, targets(batch.label, logits), batch.mask)
        return sums.replace(sets=sets), model_state

    def logits(
        self, params: Any, model_state: Any, images: jax.Array, views: Sequence[Any], *, train: bool, key: Any
    ) -> tuple[jax.Array, Any]:
        """Return the logits, float[B, K] in float32 or wider, of preprocessed images, and the new model state.

        Args:
            views: the batches that the images were made of, each with the key of its examples.
        """
        logits, model_state = self.outputs(params, model_state, images, views, train=train, key=key)
        return wide_logits(logits, (len(images), self.loss.labels.num_classes)), model_state

    def outputs(
        self, params: Any, model_state: Any, images: jax.Array, views: Sequence[Any], *, train: bool, key: Any
    ) -> tuple[jax.Array, Any]:
        """Return what the model returns for preprocessed images, and the new model state; see `logits`."""
        if train:
            # The program computes the keys only for models that take them.
            parts = [example_keys(*view) for view in views] if takes_example_keys(self.model) else []
            keys = {"example_keys": jnp.concatenate(parts) if len(parts) > 1 else parts[0]} if parts else {}
            return rematerialized(self.model, self.remat)(params, model_state, images, key=key, **keys)
        return self.predict(params, model_state, images), model_state

    def columns(self, logits: jax.Array, batch: Batch, mixing: Mixing | None) -> list[tuple[jax.Array, jax.Array]]:
        """Return the value and the weight of each example, float[B] each, for the loss and then for each metric."""
        columns = self._columns(logits, batch.label)
        if mixing is not None:
            mixed_columns, share = self._columns(logits, mixing.label), mixing.weight.astype(logits.dtype)
            if batch.weight is not None:  # Each label has the weight of its own image. `sums` multiplies by the first.
                ratio = partners(batch.weight) / jnp.where(batch.mask > 0, batch.weight, 1)
                mixed_columns[0] = jax.tree.map(lambda column: column * ratio, mixed_columns[0])
            columns = jax.tree.map(lambda one, other: share * one + (1 - share) * other, columns, mixed_columns)
        return columns

    def sums(self, columns: Sequence[tuple[jax.Array, jax.Array]], batch: Batch) -> MetricSums:
        """Sum the result of `columns` over a batch's unmasked examples, with their weights for the loss."""
        dtype = columns[0][0].dtype
        if batch.weight is not None:
            columns = [jax.tree.map(lambda column: column * batch.weight, columns[0]), *columns[1:]]
        names, ones = ("loss", *self._example_metrics), jnp.ones(batch.mask.shape, dtype)
        if batch.substituted is not None:
            columns, names = [*columns, (batch.substituted.astype(dtype), ones)], (*names, SUBSTITUTED)
        columns = [*columns, (ones, ones)]

        def total(column: jax.Array) -> jax.Array:
            # The value of a padded example may be NaN, and 0 * NaN is NaN. So the value is replaced by 0.
            return jnp.where(batch.mask > 0, column * batch.mask, 0).sum()

        return MetricSums(jnp.stack([jnp.stack([*map(total, pair)]) for pair in columns]), names)

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
        metrics = [(metric(jax.lax.stop_gradient(logits), labels), ones) for metric in self._example_metrics.values()]
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
        images = counted(shape[0], "image")
        raise InputError(f"the model returned {result} for {images}; return logits, float{list(shape)}")
    return as_wide(logits)


class BatchArrays(NamedTuple):
    """The result of `ExamplesMetric.examples` for one batch, and the batch's mask."""

    arrays: Any
    mask: jax.Array


def is_set_metric(metric: Any) -> bool:
    """Return whether an object has the method `finish`, like every metric over a set."""
    return callable(getattr(metric, "finish", None))


def compute_contributions(
    metrics: Mapping[str, Any], logits: jax.Array, labels: jax.Array, mask: jax.Array
) -> dict[str, Any]:
    """Return the contribution of a slice of a batch to each metric over a set. Other metrics are ignored."""
    set_metrics = {name: metric for name, metric in metrics.items() if is_set_metric(metric)}
    # The logits of padded examples may have any value, including NaN.
    unpadded = jnp.where(mask[:, None] > 0, logits, 0)
    return {name: _of_slice(metric, unpadded, labels, mask) for name, metric in set_metrics.items()}


def combine_devices(contributions: Mapping[str, Any]) -> dict[str, Any]:
    """Combine the contributions of all devices, replicated. Call it inside `jax.shard_map`.

    Sums are added. Arrays of examples are concatenated in the order of the batch.
    """

    def concatenate(values: jax.Array) -> jax.Array:
        return stack_over_devices(values).reshape(-1, *values.shape[1:])

    def combine(found: Any) -> Any:
        if isinstance(found, BatchArrays):
            return jax.tree.map(concatenate, found)
        return jax.tree.map(lambda values: jax.lax.psum(values, AXIS), found)

    return {name: combine(found) for name, found in contributions.items()}


class SetSums:
    """The contributions of the batches so far; see `combine_devices`."""

    def __init__(self) -> None:
        self._sums, self._examples = dict[str, Any](), list[dict[str, Any]]()

    def add(self, contributions: Mapping[str, Any]) -> None:
        """Add the contributions of one or more batches, along a first axis.

        The arrays of examples, [batches, B, …], are copied to the host without the padding, as [n, …].
        """
        kept = {name: each for name, each in contributions.items() if isinstance(each, BatchArrays)}
        if sums := {name: each for name, each in contributions.items() if name not in kept}:
            self._sums = added(self._sums or None, sums)
        self._examples.append({name: _unpadded(*each) for name, each in jax.device_get(kept).items()})

    def results(self) -> dict[str, Any]:
        """Return the arguments of each metric's `finish`, by name, as NumPy arrays."""
        examples = jax.tree.map(lambda *parts: np.concatenate(parts), *self._examples) if self._examples else {}
        return {**jax.device_get(self._sums), **examples}


def _unpadded(arrays: Any, mask: np.ndarray) -> Any:
    return jax.tree.map(lambda values: values.reshape(-1, *values.shape[2:])[mask.reshape(-1) > 0], arrays)


@jax.jit
def added(total: Any, batches: Any) -> Any:
    """Add trees of sums batch by batch, so the result has the same bits for any number of batches in a step.

    Args:
        total: the sum of earlier batches; None if there are none.
        batches: the sums of one or more batches, along a first axis.
    """
    for number in range(len(jax.tree.leaves(batches)[0])):
        each = jax.tree.map(lambda values, number=number: values[number], batches)
        total = each if total is None else jax.tree.map(jnp.add, total, each)
    return total


def finish_metrics(metrics: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """Compute the numbers of all metrics over a set. `found` holds the combined contributions of the whole set."""
    finished = [metric.finish(found[name]) for name, metric in metrics.items() if name in found]
    return {key: float(value) for numbers in finished for key, value in numbers.items()}


def check_set_metric(metric: Any, name: str, labels: LabelKind) -> tuple[str, ...]:
    """Try a metric on random logits with every class among the labels, and return the names of its numbers.

    Raises:
        InputError: the metric fails, does not have exactly one of the methods `sums` and `examples`, or has other
            numbers for a divided batch than for the whole batch.
    """
    check_form(metric, name, labels)
    if callable(getattr(metric, "sums", None)) is callable(getattr(metric, "examples", None)):
        raise InputError(f"{name}: a metric over a set needs finish and either sums or examples; give one of the two")
    logits, batch_labels = next(random_batches(labels))
    cut = len(logits) // 2
    with errors_name_call(name, f"logits float32{list(logits.shape)} and labels {shaped(batch_labels)}"):
        whole = _try_metric(metric, [(logits, batch_labels)])
        parts = _try_metric(metric, [(logits[:cut], batch_labels[:cut]), (logits[cut:], batch_labels[cut:])])
    for key, value in whole.items():
        advice = "return sums over the examples whose mask is 1, or arrays with one value for each example"
        _check_alone(f"{name}: {key}", value, parts[key], advice)
    return tuple(whole)


def _of_slice(metric: Any, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
    if hasattr(metric, "examples"):
        return BatchArrays(metric.examples(logits, labels), mask)
    return metric.sums(logits, labels, mask)


def _try_metric(metric: Any, parts: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Return a metric's numbers for a set of these batches, each padded by one example."""
    set_sums = SetSums()
    for logits, labels in parts:
        padded = (np.concatenate([array, array[:1]]) for array in (logits, labels))
        mask = np.append(np.ones(len(logits)), 0.0)
        contribution = jax.jit(functools.partial(_of_slice, metric))(*jax.device_put((*padded, mask)))
        set_sums.add({"": jax.tree.map(lambda each: each[None], contribution)})
    return finish_metrics({"": metric}, set_sums.results())


def mean_logits(classify: Callable[[jax.Array], jax.Array], images: jax.Array, views: "Views") -> jax.Array:
    """Return the mean logits, float[B, K] in float32 or wider, over views of normalized images [B, H, W, C].

    Args:
        classify: a function of images that returns logits.
        views: "one" is the image alone. "mirror" is the image and its mirror image, with equal weights.
            "mirror_translate" (Jordan 2024, arXiv:2404.00498) adds four views: the image translated by one pixel down
            and right, the image translated by one pixel up and left, and the mirror images of both. The border is
            reflected. The four added views have half of the total weight.
    """
    if views == "one":
        return classify(images)

    copies = [(0.5, images)]
    if views == "mirror_translate":
        copies = [(0.25, images), *((0.25 / 2, copy) for copy in _translated(images))]
    weighted = [weight * as_wide(classify(view)) for weight, copy in copies for view in (copy, copy[:, :, ::-1])]
    return functools.reduce(jnp.add, weighted)


def _translated(images: jax.Array) -> tuple[jax.Array, jax.Array]:
    height, width = images.shape[1:3]
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    return padded[:, :height, :width], padded[:, 2:, 2:]
