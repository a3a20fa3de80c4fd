"""The losses of a batch of examples, as functions of logits and labels."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from jaxddp.config.registry import LOSSES
from jaxddp.config.values import checked
from jaxddp.core.errors import InputError, counted
from jaxddp.core.libraries import Lazy
from jaxddp.core.ranges import Decay, Factor

if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    import optax

    from jaxddp.config import Config
    from jaxddp.data.source import LabelForm
else:
    jax, jnp, optax = map(Lazy, ("jax", "jax.numpy", "optax"))

Loss = Callable[["jax.Array", "jax.Array"], Any]
# Arrays become lists.
_Weights = Annotated[tuple[Factor, ...], lambda weights: getattr(weights, "tolist", lambda: weights)()] | None


def _takes(*forms: "LabelForm") -> Callable[[Loss], Loss]:
    """Return a decorator that declares the forms of labels that a loss takes; see `check_form`."""

    def declared(loss: Loss) -> Loss:
        loss.__dict__["takes"] = forms
        return loss

    return declared


def _check(label_smoothing: Any, class_weights: Any) -> tuple[float, Any]:
    """Return the settings of a loss: a share, and None or a tuple of numbers. Raises: InputError."""
    return checked(label_smoothing, Decay, "label_smoothing"), checked(class_weights, _Weights, "class_weights")


def _of_classes(weights: Sequence[float], logits: "jax.Array") -> "jax.Array":
    """Return weights as an array of the dtype of logits [B, K]. Raises: InputError if there are not K weights."""
    if len(weights) != (classes := logits.shape[-1]):
        raise InputError(f"class_weights: {counted(len(weights), 'weight')} for {classes} classes; give one for each")
    return jnp.asarray(weights, logits.dtype)


def cross_entropy(label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None) -> Loss:
    """Return softmax cross-entropy, (logits float[B, K], labels int32[B], or shares float[B, K]) -> float[B].

    Args:
        label_smoothing: the share of each label that is spread over all classes (Szegedy et al. 2016,
            arXiv:1512.00567, section 7).
        class_weights: K weights of the classes. With weights the loss returns a pair of sums; see
            `negative_log_likelihood`.

    Raises:
        InputError: a setting is out of its range. The loss raises it if there are not K weights.
    """
    weighted = negative_log_likelihood(label_smoothing, class_weights)

    @_takes("one label", "shares")
    def loss(logits: jax.Array, labels: jax.Array) -> Any:
        if class_weights is not None:
            return weighted(jax.nn.log_softmax(logits), labels)
        if labels.ndim == 1 and not label_smoothing:
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        shares = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype) if labels.ndim == 1 else labels
        return optax.softmax_cross_entropy(logits, optax.smooth_labels(shares, label_smoothing))

    return loss


@_takes("one label", "shares")
def softmax_cross_entropy(logits: "jax.Array", labels: "jax.Array") -> Any:
    """Return the default loss: logits float[B, K] and labels int32[B] give float[B]."""
    return cross_entropy()(logits, labels)


def negative_log_likelihood(label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None) -> Loss:
    """Return a loss for networks that return log-probabilities: (float[B, K], labels) -> float[B].

    Labels are int32[B], or shares of the classes, float[B, K].

    Args:
        label_smoothing: the share of each label that is spread over all classes; see `cross_entropy`.
        class_weights: K numbers from 0. With weights the loss returns a pair: the sum of the weighted losses, and the
            sum of the labels' weights. In a smoothed label, the share of each class has the weight of that class. With
            one label, the quotient of the sums is PyTorch's `cross_entropy` with `weight` and `label_smoothing`. (For
            shares, PyTorch divides by the number of examples.)
    """
    label_smoothing, class_weights = _check(label_smoothing, class_weights)

    def terms(log_probabilities: jax.Array, labels: jax.Array) -> jax.Array:
        if labels.ndim == 1:
            of_label = -jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)[:, 0]
        else:
            of_label = -(labels * log_probabilities).sum(-1)
        smoothed = (1 - label_smoothing) * of_label - label_smoothing * log_probabilities.mean(-1)
        return smoothed if label_smoothing else of_label

    @_takes("one label", "shares")
    def loss(log_probabilities: jax.Array, labels: jax.Array) -> Any:
        if class_weights is None:
            return terms(log_probabilities, labels)
        weights = _of_classes(class_weights, log_probabilities)
        weight = weights[labels] if labels.ndim == 1 else labels @ weights
        return terms(log_probabilities * weights[None], labels).sum(), weight.sum()

    return loss


def binary_cross_entropy(label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None) -> Loss:
    """Return a loss (logits float[B, K], labels) -> float[B]: each class is a separate binary decision.

    The loss of an example is the mean over the classes. Labels are int32[B], one class each, or multi-hot, [B, K]. timm
    also takes the mean over the classes, as in the recipes of "ResNet strikes back" (arXiv:2110.00476). The loss is
    linear in the targets, so for mixed images the mix of the losses is the loss of the mixed targets. timm's
    `target_threshold` is not linear and is not supported.

    Args:
        label_smoothing: with one label, the share of the label that is spread over all classes, as in timm. With
            multi-hot labels, the share by which targets move towards one half, as in Keras; for shares, set 0.
        class_weights: K numbers that multiply the terms of their classes, without normalization, like PyTorch's
            `weight`.
    """
    label_smoothing, class_weights = _check(label_smoothing, class_weights)

    @_takes("one label", "several labels", "shares")
    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        is_single, classes, dtype = labels.ndim == 1, logits.shape[-1], logits.dtype
        targets = jax.nn.one_hot(labels, classes, dtype=dtype) if is_single else labels.astype(dtype)
        if label_smoothing:
            targets = (1 - label_smoothing) * targets + label_smoothing / (classes if is_single else 2)
        terms = optax.sigmoid_binary_cross_entropy(logits, targets)
        return (terms if class_weights is None else terms * _of_classes(class_weights, logits)[None]).mean(-1)

    return loss


@_takes("one label", "several labels", "shares")
def sigmoid_cross_entropy(logits: "jax.Array", labels: "jax.Array") -> Any:
    """Return the default loss if an image may have several labels: float[B, K] and labels float[B, K] give float[B]."""
    return binary_cross_entropy()(logits, labels)


@_takes("numbers")
def squared_error(predictions: "jax.Array", targets: "jax.Array") -> "jax.Array":
    """Return the mean over the numbers of an example: predictions and targets float[B, K] give float[B]."""
    return jnp.square(predictions - targets).mean(-1)


@_takes("numbers")
def huber(predictions: "jax.Array", targets: "jax.Array") -> "jax.Array":
    """Return half of the squared error below an error of 1, and the error minus 1/2 above it, as `squared_error`."""
    return optax.huber_loss(predictions, targets).mean(-1)


DEFAULT_LOSSES: "dict[LabelForm, Loss]" = dict.fromkeys(("one label", "shares"), softmax_cross_entropy)
DEFAULT_LOSSES |= {"several labels": sigmoid_cross_entropy, "numbers": squared_error}
"""The default loss of each form of labels."""


def _of_config(name: str, make: Callable[..., Loss]) -> None:
    """Add a loss that takes its label smoothing from the config."""

    def of_config(config: "Config", class_weights: Sequence[float] | None = None) -> Loss:
        return make(config.train.label_smoothing, class_weights)

    LOSSES.add(name)(of_config)


_of_config("cross_entropy", cross_entropy)
_of_config("nll", negative_log_likelihood)
_of_config("bce", binary_cross_entropy)
LOSSES.add("mse")(lambda config: squared_error)
LOSSES.add("huber")(lambda config: huber)
