"""Classifiers of features, which measure how well the features separate classes.

- `knn`: the vote of the k nearest training images (`vote_of_neighbours`), with k = 20 as in Caron et al. 2021
  (arXiv:2104.14294).
- `linear`: logistic regression on standardized features. Its inverse regularization strength C is chosen on a tenth of
  the training images, similar to Radford et al. 2021 (arXiv:2103.00020), but from fewer values; the regression is then
  repeated on all of them.
"""

import warnings
from typing import NamedTuple

import numpy as np

from jaxddp.core.errors import InputError, counted, requires
from jaxddp.inference.predictions import LabelledFeatures
from jaxddp.metrics import TEMPERATURE, vote_of_neighbours

NEIGHBOURS = 20
STRENGTHS = tuple(10.0**power for power in range(-5, 6))
"""The values of C, from strong to weak regularization."""
_HELD_OUT = 0.1
_SEED = 0
_MOST_ITERATIONS = 1000


class Probe(NamedTuple):
    """The result of a probe.

    Attributes:
        predictions: int64[N], the predicted class of each validation image.
        top1: the share of correct predictions.
        settings: what the classifier used, for the user.
    """

    predictions: np.ndarray
    top1: float
    settings: str


def knn(train: LabelledFeatures, val: LabelledFeatures, neighbours: int = NEIGHBOURS) -> Probe:
    """Classify validation images by the weighted vote of their nearest training images.

    Raises:
        InputError: there are fewer training images than neighbours, or the files have different networks, layers or
            classes.
    """
    _check_comparable(train, val)
    if neighbours > len(train.labels):
        raise InputError(f"--neighbours {neighbours}: {train.path} has {counted(len(train.labels), 'usable image')}")
    predictions = vote_of_neighbours(val.features, train.features, train.labels, neighbours)
    return _probe(predictions, val, f"k {neighbours}, temperature {TEMPERATURE}")


def linear(train: LabelledFeatures, val: LabelledFeatures) -> Probe:
    """Classify validation images by logistic regression.

    Raises:
        InputError: the training images are all of one class, or fewer than ten, or scikit-learn is not installed; see
            also `knn`.
    """
    _check_comparable(train, val)
    if len(np.unique(train.labels)) < 2 or len(train.labels) < 1 / _HELD_OUT:
        raise InputError(f"{train.path}: a linear probe needs at least 10 images, of at least 2 classes")
    with requires("probe", "scikit-learn", "features"):
        from sklearn import exceptions, linear_model, model_selection, pipeline, preprocessing
        from threadpoolctl import threadpool_limits  # scikit-learn requires it.
    counts = np.bincount(train.labels)
    held_out = round(_HELD_OUT * len(train.labels))
    # A stratified part needs an image of each class, and leaves one.
    is_stratified = counts[counts > 0].min() > 1 and held_out >= (counts > 0).sum()
    splitter = model_selection.StratifiedShuffleSplit if is_stratified else model_selection.ShuffleSplit
    every = np.arange(len(train.labels))
    # The only image of a class stays in training, unless too few classes have more.
    rows = several if len(several := np.flatnonzero(counts[train.labels] > 1)) > held_out else every
    held = rows[next(splitter(1, test_size=held_out, random_state=_SEED).split(rows, train.labels[rows]))[1]]
    regression = linear_model.LogisticRegression(max_iter=_MOST_ITERATIONS)
    classifier = pipeline.make_pipeline(preprocessing.StandardScaler(), regression)
    parts = [(np.setdiff1d(every, held), held)]
    search = model_selection.GridSearchCV(classifier, {"logisticregression__C": STRENGTHS}, cv=parts)
    # On cores that other programs use, too, small products in several threads take a hundred times as long.
    with warnings.catch_warnings(), threadpool_limits(1 if train.features.size < 10**7 else None):
        # A regression that has not converged is a valid, slightly different classifier.
        warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
        predictions = search.fit(train.features, train.labels).predict(val.features)
    strength = search.best_params_["logisticregression__C"]
    return _probe(predictions, val, f"C {strength:g}, chosen on {counted(held_out, 'held-out training image')}")


def _check_comparable(train: LabelledFeatures, val: LabelledFeatures) -> None:
    """Raise `InputError` if two files have features of different networks or layers, or other classes."""
    widths = (f"{file.features.shape[1]} features" for file in (train, val))
    layers = (file.network[1] or "the default" for file in (train, val))
    networks = (file.network[0] for file in (train, val))
    for kind, (of_train, of_val) in {"network": networks, "layer": layers, "size": widths}.items():
        if of_train != of_val:
            fault = f"is of another {kind} than {train.path}: {of_val}, not {of_train}"
            raise InputError(f"{val.path}: {fault}", advice="compute both files with the same network and --layer")
    if train.class_ids != val.class_ids:
        raise InputError(f"{val.path}: has other classes than {train.path}; give two splits of one data set")


def _probe(predictions: np.ndarray, val: LabelledFeatures, settings: str) -> Probe:
    return Probe(predictions, float((predictions == val.labels).mean()), settings)
