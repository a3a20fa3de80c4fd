"""The loss that a config names, with class weights, for training and for evaluation."""

import functools
import inspect
from typing import Any

import numpy as np

from jaxddp.config import Config
from jaxddp.config.model_section import BALANCED
from jaxddp.config.registry import LOSSES
from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import counted
from jaxddp.data.labels import LabelKind
from jaxddp.engine.example_loss import ExampleLoss, example_loss

_KEY = "loss.class_weights"


def configured_losses(
    config: Config, labels: LabelKind, class_counts: np.ndarray, num_examples: int
) -> tuple[ExampleLoss, ExampleLoss]:
    """Return the loss of training and the loss of evaluation, which has no label smoothing.

    Args:
        class_counts: int64[K], the number of training examples of each class.
        num_examples: the number of training examples.

    Raises:
        InputError: the name is unknown, or the class weights do not fit the loss or the classes.
    """
    weights = class_weights(config, class_counts, num_examples)
    training = _make_loss(config, weights, labels)
    plain = config.replace(train={"label_smoothing": 0.0})
    return training, training if config == plain else _make_loss(plain, weights, labels)


def class_weights(config: Config, class_counts: np.ndarray, num_examples: int) -> np.ndarray | None:
    """Return the class weights, float64[K], or None. Balanced weights are N / (K n_k) for n_k of N examples in class k.

    With several labels for each example, the sum of the n_k is above N.

    Raises: InputError if there are not K weights, or weights are balanced and a class has no examples.
    """
    weights = config.loss.weights
    if weights is None:
        return None
    if weights == BALANCED:
        missing = np.flatnonzero(class_counts == 0)
        if len(missing):
            raise InputError(
                Key.plain(_KEY, BALANCED),
                f": class {missing[0]} of {len(class_counts)} has no training images",
                advice=("give the weights, or leave it out with ", Key("data.classes")),
            )
        return num_examples / (len(class_counts) * class_counts)
    if len(weights) != len(class_counts):
        raise InputError(
            Key(_KEY),
            f": {counted(len(weights), 'weight')} for {counted(len(class_counts), 'class')}",
            advice="give one for each, in order",
        )
    return np.array(weights)


def _make_loss(config: Config, weights: np.ndarray | None, labels: LabelKind) -> ExampleLoss:
    make: Any = LOSSES.get(config.loss.name)
    if weights is not None:
        if "class_weights" not in inspect.signature(make).parameters:
            raise InputError(
                Key(_KEY), ": ", Key.plain("loss.name", config.loss.name), " takes no weights", advice="leave them out"
            )
        make = functools.partial(make, class_weights=tuple(weights.tolist()))
    try:
        return example_loss(make(config), labels)
    except InputError as error:
        if not labels.several:
            raise
        raise InputError(
            Key.plain("loss.name", config.loss.name),
            " does not take several labels of an image, which the training data have",
            advice=("set ", Key("loss.name"), " to bce, or leave one label in each row"),
        ) from error
