"""The metrics of evaluation: functions of logits and labels, and metrics over a whole set.

`jaxddp.engine.objective` documents the two protocols of metrics over a set.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.calibration import BINS, reliability
from jaxddp.config.registry import METRICS

TEMPERATURE, _AT_ONCE, _SHORTEST = 0.07, 1024, 1e-12
"""The temperature of the votes of neighbours, and the number of images whose similarities are computed at once."""
DEFAULT_METRICS = {"several labels": ("map",), "shares": ("top1",), "numbers": ("mae",)}
"""The metrics that Python's functions measure by default for forms of labels other than one label."""


@dataclass(frozen=True)
class TopK:
    """Top-k accuracy: 1 if the label is among the k largest logits, else 0.

    The first of equal logits counts as the largest. If the label's logit is NaN, the result is 0. A call takes logits
    float[B, K] and labels int32[B], and returns float32[B]. The label of shares, float[B, K], is the largest share.
    """

    k: int
    takes = ("one label", "shares")

    @property
    def min_classes(self) -> int:
        """Return the least number of classes for which this metric is measured.

        With fewer classes the metric would always be 1. Top-1 is measured for any number of classes.
        """
        return 1 if self.k == 1 else self.k + 1

    def __call__(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        labels = labels if labels.ndim == 1 else labels.argmax(-1)
        label_logit = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        earlier = jnp.arange(logits.shape[-1])[None] < labels[:, None]
        is_larger = jnp.where(earlier, ~(logits < label_logit), ~(logits <= label_logit))
        return (is_larger.sum(-1) < self.k).astype(jnp.float32)


class ExactMatch:
    """Exact match for several labels: 1 if the classes with positive logits are exactly the example's labels, else 0.

    A call takes logits float[B, K] and labels float[B, K], and returns float32[B].
    """

    takes = ("several labels",)

    def __call__(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        return ((logits > 0) == (labels > 0.5)).all(-1).astype(jnp.float32)


class MeanClassAccuracy:
    """The mean top-1 accuracy over the classes that occur: balanced accuracy (Brodersen et al. 2010).

    The metric is NaN for a set without examples.
    """

    takes = ("one label",)

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """Count for each class the examples and the right predictions, int32[K] each; see `SumsMetric`."""
        real = (mask > 0).astype(jnp.int32)
        right = real * TopK(1)(logits, labels).astype(jnp.int32)
        zeros = jnp.zeros(logits.shape[-1], jnp.int32)
        return {"right": zeros.at[labels].add(right), "examples": zeros.at[labels].add(real)}

    def finish(self, found: Any) -> Mapping[str, float]:
        occurs = found["examples"] > 0
        accuracies = found["right"][occurs] / found["examples"][occurs]
        return {"mean_class_accuracy": float(np.mean(accuracies)) if occurs.any() else float("nan")}


class F1:
    """`f1`, the mean of the classes' F1 scores, and `f1_micro`, the F1 score of the counts summed over the classes.

    If an example may have several labels, each positive logit (a probability above one half) predicts its class.
    Otherwise the largest logit predicts the class. A class without labels and predictions has no F1 score, and `f1` is
    the mean over the other classes: scikit-learn's `f1_score` with `zero_division=np.nan`, which for one label equals
    its default. A class that occurs only in the labels, or only in the predictions, has an F1 score of 0. Both numbers
    are NaN for a set without labels and predictions.
    """

    takes = ("one label", "several labels")

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """Count for each class the right predictions, all predictions and the labels, int32[K]; see `SumsMetric`."""
        classes, real = jnp.arange(logits.shape[-1])[None], mask[:, None] > 0
        several = labels.ndim == 2
        actual = real & (labels > 0.5 if several else labels[:, None] == classes)
        predicted = real & (logits > 0 if several else logits.argmax(-1)[:, None] == classes)
        columns = {"right": actual & predicted, "predicted": predicted, "actual": actual}
        return {name: column.sum(0, dtype=jnp.int32) for name, column in columns.items()}

    def finish(self, found: Any) -> Mapping[str, float]:
        right = np.asarray(found["right"], np.int64)
        total = np.asarray(found["predicted"] + found["actual"], np.int64)
        occurs = total > 0
        if not occurs.any():
            return {"f1": float("nan"), "f1_micro": float("nan")}
        by_class = 2 * right[occurs] / total[occurs]
        return {"f1": float(by_class.mean()), "f1_micro": float(2 * right.sum() / total.sum())}


class MeanAveragePrecision:
    """Mean average precision over the classes that occur.

    The average precision of a class is the sum of precision times the increase of recall over all thresholds, without
    interpolation, as in scikit-learn's `average_precision_score`. Equal scores share a threshold. Scores are logits if
    an example may have several labels, and log-probabilities otherwise. The host keeps all scores of the set in memory,
    N * K * 4 bytes.
    """

    takes = ("one label", "several labels")

    def examples(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Return the scores, and the membership of each example in each class, [B, K] each; see `ExamplesMetric`."""
        if labels.ndim == 2:
            return {"scores": logits, "members": labels > 0.5}
        members = labels[:, None] == jnp.arange(logits.shape[-1])[None]
        return {"scores": jax.nn.log_softmax(logits), "members": members}

    def finish(self, found: Any) -> Mapping[str, float]:
        scores, members = found["scores"], found["members"] > 0
        precisions = [average_precision(scores[:, k], members[:, k]) for k in np.flatnonzero(members.any(0))]
        return {"map": float(np.mean(precisions)) if precisions else float("nan")}


def average_precision(scores: np.ndarray, members: np.ndarray) -> float:
    """Return the average precision of one class from scores, float[N], and members, bool[N] with at least one true.

    The result is NaN if a score is NaN.
    """
    if np.isnan(scores).any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(members[order])
    # The last index of each group of equal scores.
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    return float((hits[ends] / (ends + 1) * np.diff(hits[ends], prepend=0)).sum() / hits[-1])


@dataclass(frozen=True)
class CalibrationError:
    """Expected calibration error; see `jaxddp.calibration.Reliability`."""

    bins: int = BINS
    takes = ("one label",)

    def examples(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Return each prediction's probability, and 1 if it is right, float32[B] each; see `ExamplesMetric`."""
        return {"confidence": jax.nn.softmax(logits).max(-1), "right": TopK(1)(logits, labels)}

    def finish(self, found: Any) -> Mapping[str, float]:
        confidence, right = (np.asarray(found[key], np.float64) for key in ("confidence", "right"))
        if not np.isfinite(confidence).all() or not len(confidence):
            return {"ece": float("nan")}
        return {"ece": reliability(confidence, right, self.bins).error}


class MeanAbsoluteError:
    """The mean absolute error of the numbers of an example."""

    takes = ("numbers",)

    def __call__(self, predictions: jax.Array, targets: jax.Array) -> jax.Array:
        """Return float[B] for predictions and targets, float[B, K] each."""
        return jnp.abs(predictions - targets).mean(-1)


def _mean_explained(errors: np.ndarray, of_chance: np.ndarray) -> float:
    """Return the mean of 1 - errors / of_chance over the numbers to predict, [K]; NaN if an error of chance is 0."""
    return float(np.mean(1 - np.divide(errors, of_chance, where=of_chance > 0, out=errors * np.nan)))


class R2:
    """The coefficient of determination, the mean over the numbers to predict, as scikit-learn's `r2_score`.

    It is NaN if a number is the same in all examples. The host keeps all numbers of the set in memory.
    """

    takes = ("numbers",)

    def examples(self, predictions: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
        """Return both, float[B, K] each; see `ExamplesMetric`."""
        return {"predictions": predictions, "targets": targets}

    def finish(self, found: Any) -> Mapping[str, float]:
        predictions, targets = (np.asarray(found[key], np.float64) for key in ("predictions", "targets"))
        around_mean = np.square(targets - targets.mean(0)).sum(0)
        return {"r2": _mean_explained(np.square(targets - predictions).sum(0), around_mean)}


class QuadraticKappa:
    """Cohen's kappa with quadratic weights (Cohen 1968) for ordered grades 0, 1, 2, …

    The grades are the classes in their order, or the numbers to predict, rounded. Kappa is 1 minus the mean squared
    difference of grade and prediction, divided by that of independent grades and predictions; the mean over the numbers
    to predict. It is NaN if all grades and predictions of one of these are equal.
    """

    takes = ("one label", "numbers")

    def examples(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Return the predicted and the actual grades, float[B, K] or int[B, 1]; see `ExamplesMetric`."""
        if labels.ndim == 1:
            return {"predicted": logits.argmax(-1)[:, None], "actual": labels[:, None]}
        return {"predicted": jnp.round(logits), "actual": jnp.round(labels)}

    def finish(self, found: Any) -> Mapping[str, float]:
        predicted, actual = (np.asarray(found[key], np.float64) for key in ("predicted", "actual"))
        independent = predicted.var(0) + actual.var(0) + (predicted.mean(0) - actual.mean(0)) ** 2
        return {"kappa": _mean_explained(np.square(predicted - actual).mean(0), independent)}


def vote_of_neighbours(features: np.ndarray, references: np.ndarray, labels: np.ndarray, neighbours: int) -> np.ndarray:
    """Return the class of each row of features, float[N, D], by the vote of its nearest references, float[M, D].

    The nearest references have the largest cosine similarities s. The vote of each is exp(s / `TEMPERATURE`).
    Source: Wu et al. 2018 (arXiv:1805.01978).
    """
    lengths = [np.maximum(np.linalg.norm(each, axis=1, keepdims=True), _SHORTEST) for each in (features, references)]
    features, references = features / lengths[0], references / lengths[1]
    predictions, rows = list[np.ndarray](), np.arange(_AT_ONCE)[:, None]
    for start in range(0, len(features), _AT_ONCE):
        similarities = features[start : start + _AT_ONCE] @ references.T
        nearest = np.argpartition(-similarities, neighbours - 1)[:, :neighbours]
        weights = np.exp(np.take_along_axis(similarities, nearest, 1) / TEMPERATURE)
        votes = np.zeros((len(similarities), labels.max() + 1))
        np.add.at(votes, (rows[: len(votes)], labels[nearest]), weights)
        predictions.append(votes.argmax(1))
    return np.concatenate(predictions)


@dataclass(frozen=True)
class NearestNeighbours:
    """The accuracy of `vote_of_neighbours` among the images of `Evaluator.references`.

    Without references, as in `check_set_metric`, the images of the set itself vote. The features take the place of the
    logits. The metric is NaN if a feature is not finite.
    """

    neighbours: int = 200
    takes = ("one label",)

    def examples(self, features: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Return both; see `ExamplesMetric`."""
        return {"features": features, "labels": labels}

    def finish(self, found: Any) -> Mapping[str, float]:
        references = found.get("references", found)
        if not all(np.isfinite(each["features"]).all() for each in (found, references)):
            return {"knn_accuracy": float("nan")}
        arguments = references["features"], references["labels"], min(self.neighbours, len(references["labels"]))
        return {"knn_accuracy": float((vote_of_neighbours(found["features"], *arguments) == found["labels"]).mean())}


class ConfusionMatrix:
    """Counts of examples by label and by prediction. An example with a logit that is not finite is excluded."""

    takes = ("one label",)

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
        """Return int32[K, K]: labels in rows, predictions in columns; see `SumsMetric`.

        The prediction is the class with the largest logit. Of equal logits the first one counts.
        """
        classes = logits.shape[-1]
        counts = (mask > 0) & jnp.isfinite(logits).all(-1)
        return jnp.zeros((classes, classes), jnp.int32).at[labels, logits.argmax(-1)].add(counts.astype(jnp.int32))

    def finish(self, found: Any) -> Mapping[str, float]:
        return {}


_METRICS = {f"top{k}": TopK(k) for k in (1, 5, 10)}
_METRICS |= {"exact_match": ExactMatch(), "mean_class_accuracy": MeanClassAccuracy(), "f1": F1()}
_METRICS |= {"map": MeanAveragePrecision(), "ece": CalibrationError(), "confusion": ConfusionMatrix()}
_METRICS |= {"mae": MeanAbsoluteError(), "r2": R2(), "kappa": QuadraticKappa()}
for _name, _metric in _METRICS.items():
    METRICS.add(_name)(_metric)
