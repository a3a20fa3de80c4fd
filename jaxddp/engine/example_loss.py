"""Convert a loss of any accepted form to a value and a weight for each example.

The loss of a batch is then the same for any padding and any division of the batch among devices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.data.labels import LabelKind

Loss = Callable[[jax.Array, jax.Array], Any]
"""(logits float[B, K], labels int32[B]) -> the loss of each example, float[B]; or the mean of these losses, float[]; or
a pair (sum, weight). For pairs, training minimizes the sum over the global batch divided by the weight of the global
batch, as for a loss with class weights. If examples may have several labels, labels are float[B, K], with 1 for each
class of an example."""

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
    form, dtype = _form(loss, name, labels, _ACCEPTED)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(f"{name}: returned {dtype}, which has no gradient; {_ACCEPTED}")
    converted = ExampleLoss(loss, form, labels)

    @jax.jit
    def evaluate(logits: jax.Array, labels: jax.Array) -> tuple[Any, Any, Any]:
        values, weights = converted(logits, labels)
        batched = loss(logits, labels)
        if form == "examples":
            single = jax.vmap(lambda logit, label: loss(logit[None], label[None])[0])(logits, labels)
            return batched, single, jnp.zeros(())
        if form == "mean":
            return batched, values.mean(), jnp.zeros(())
        weight_gradient = jax.grad(lambda logits: _scalars(loss(logits, labels))[1].astype(jnp.float32))(logits)
        return jnp.stack(_scalars(batched)), jnp.stack([values.sum(), weights.sum()]), jnp.abs(weight_gradient).max()

    for logits, batch_labels in random_batches(labels):
        batched, single, weight_gradient = jax.device_get(evaluate(logits, batch_labels))
        if not np.isfinite(batched).all():
            # A loss for a model that ends with a softmax takes probabilities.
            batched, single, weight_gradient = jax.device_get(evaluate(jax.nn.softmax(logits), batch_labels))
        if not np.allclose(batched, single, rtol=_tolerance(batched), atol=_tolerance(batched), equal_nan=False):
            raise InputError(f"{name}: {_difference(form, np.asarray(batched), np.asarray(single))}; {_ACCEPTED}")
        if weight_gradient > 0:
            raise InputError(f"{name}: its weight depends on the logits; compute it from the labels alone")
        if form == "weighted" and not batched[1] > 0:
            weight = f"its weight over a batch of all classes is {batched[1]:.6g}"
            raise InputError(f"{name}: {weight}; give positive weights")
    return converted


def check_metric(metric: Loss, name: str, labels: LabelKind) -> None:
    """Raise `InputError` if a metric does not return one number for each example that depends on this example alone."""
    form, _ = _form(metric, name, labels, _ACCEPTED_METRIC)
    if form != "examples":
        raise InputError(f"{name}: returned one number for a batch; return one for each example, float[B]")
    for logits, batch_labels in random_batches(labels):
        batched = np.asarray(jax.jit(metric)(logits, batch_labels), np.float64)
        one_by_one = jax.jit(jax.vmap(lambda logit, label: metric(logit[None], label[None])[0]))
        single = np.asarray(one_by_one(logits, batch_labels), np.float64)
        if not np.allclose(batched, single, rtol=1e-4, atol=1e-4, equal_nan=True):
            difference = _difference("examples", batched, single, "value")
            raise InputError(f"{name}: {difference}; compute it from the example alone")


def random_batches(labels: LabelKind) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield random batches (logits float32[B, K], labels) for checks. Every class occurs as a label."""
    rng, classes = np.random.default_rng(0), labels.num_classes
    rows = min(max(classes, _FEWEST), _MOST)
    every = np.resize(rng.permutation(classes), -(-max(classes, rows) // rows) * rows)
    for part in every.reshape(-1, rows):
        logits = 2 * rng.standard_normal((rows, classes), np.float32)
        if not labels.several:
            yield logits, part.astype(np.int32)
            continue
        one_hot, more = np.arange(classes) == part[:, None], rng.random(logits.shape) < 0.2
        yield logits, (one_hot | more).astype(np.float32)


@contextmanager
def errors_of(name: str, arguments: str) -> Iterator[None]:
    """Convert an exception of a user's function, which was called with these arguments, to an `InputError`."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{name}: fails for {arguments}: {type(error).__name__}: {reason}") from error


def _form(loss: Loss, name: str, labels: LabelKind, accepted: str) -> tuple[LossForm, Any]:
    """Return the form of a loss or a metric and the dtype of its first result. Raises: InputError."""
    classes = labels.num_classes
    rows = _FEWEST if classes != _FEWEST else _FEWEST + 2
    logits = jax.ShapeDtypeStruct((rows, classes), jnp.float32)
    shapes = logits, logits if labels.several else jax.ShapeDtypeStruct((rows,), jnp.int32)
    label_type = f"float32[{rows}, {classes}], several of an image" if labels.several else f"int32[{rows}]"
    arguments = f"logits float32[{rows}, {classes}] and labels {label_type}"
    if not callable(loss):
        given = f"an object of type {type(loss).__name__} was given"
        raise InputError(f"{name}: {given}; give a function of (logits, labels)")
    with errors_of(name, arguments):
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


def _tolerance(values: Any) -> float:
    """Return the relative error that another order of summation may cause in the dtype of the loss."""
    return max(1e-5, 4 * float(jnp.finfo(np.asarray(values).dtype).eps))


def _difference(form: str, batched: np.ndarray, single: np.ndarray, noun: str = "loss") -> str:
    if form == "examples":
        index = int(np.nanargmax(np.abs(batched - single))) if np.isfinite(batched - single).any() else 0
        return f"an example's {noun} is {batched[index]:.6g} in a batch and {single[index]:.6g} alone"
    if form == "mean":
        return f"the loss of a batch is {batched:.6g}, and the mean of its examples' losses is {single:.6g}"
    pairs = [f"({total:.6g}, {weight:.6g})" for total, weight in (batched, single)]
    return "(sum, weight) of a batch is {}, and the sum over its examples is {}".format(*pairs)
