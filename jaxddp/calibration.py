"""Probabilities that hold what they say, as functions of NumPy arrays: a temperature, its error, and sets of classes.

Guo et al. 2017, "On calibration of modern neural networks" (arXiv:1706.04599), describe temperature scaling and the
expected calibration error. The sets are those of split conformal prediction with the score of Sadinle et al. 2019,
"Least ambiguous set-valued classifiers with bounded error levels" (arXiv:1609.00451).
"""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from jaxddp.core.errors import InputError, counted

BINS, _MOST = 15, 10.0
"""The number of bins of probability, and the largest |log T|."""


class Reliability(NamedTuple):
    """Predictions in M bins of equal width, ((m - 1) / M, m / M], by the probability of the predicted class.

    Attributes:
        counts: the number of predictions in each bin, int64[M].
        confidence: the sum of these probabilities, float64[M].
        right: the number of right predictions, float64[M].
    """

    counts: np.ndarray
    confidence: np.ndarray
    right: np.ndarray

    @property
    def error(self) -> float:
        """The expected calibration error: the mean over predictions of |accuracy - mean probability| of their bins."""
        return float(np.abs(self.right - self.confidence).sum() / self.counts.sum())


def reliability(confidence: np.ndarray, right: np.ndarray, bins: int = BINS) -> Reliability:
    """Sort predictions into bins, by the probabilities of the predicted classes; `right` tells which are right, [N]."""
    places = np.ceil(confidence * bins).astype(np.int64).clip(1, bins) - 1
    return Reliability(*(np.bincount(places, weights, bins) for weights in (None, confidence, right)))


def log_probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the logarithm of softmax(logits / temperature), float64[N, K]; NaN for an image with a NaN."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(1, keepdims=True))


def negative_log_likelihood(logits: np.ndarray, labels: np.ndarray, temperature: float = 1.0) -> float:
    """Return the mean of -log p of the labels, int[N], for p = softmax(logits / temperature), float[N, K]."""
    return float(-log_probabilities(logits, temperature)[np.arange(len(labels)), labels].mean())


def fitted_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature T with the least negative log likelihood of the labels.

    This likelihood is convex in 1 / T, and least where the logits of the labels have the same mean as the logits that
    softmax(logits / T) expects.

    Args:
        logits: float[N, K].
        labels: int[N].

    Raises:
        InputError: there is no least likelihood, because all predictions are right, or because the logits of the labels
            are not larger than those of other classes.
    """
    from scipy.optimize import root_scalar

    gaps = logits.astype(np.float64)
    gaps -= gaps.max(1, keepdims=True)
    of_labels = gaps[np.arange(len(labels)), labels].mean()

    def slope(log_inverse: float) -> float:
        weights = np.exp(math.exp(log_inverse) * gaps)
        return float(((weights * gaps).sum(1) / weights.sum(1)).mean() - of_labels)

    if not slope(-_MOST) < 0 < slope(_MOST):
        fault = "are all classified right" if of_labels == 0 else "are classified no better than by chance"
        raise InputError(f"no temperature fits: the {counted(len(labels), 'image')} {fault}; calibrate on other data")
    return math.exp(-root_scalar(slope, bracket=(-_MOST, _MOST)).root)


def set_threshold(probabilities: np.ndarray, coverage: float) -> float:
    """Return the least probability of the classes in a set, from the probabilities of the labels of n images, float[n].

    The score of an image is 1 - p, where p is the probability of its label. The threshold is 1 - the ceil((n + 1) *
    coverage)-th smallest score. If a further image and the n images are exchangeable, the probability that its set
    contains its label is at least `coverage`.

    Raises: InputError if there are too few images.
    """
    # The product of floats can be just above a whole number: 100 * 0.55 is 55.00000000000001.
    count, share = len(probabilities), Fraction(str(coverage))
    rank = math.ceil((count + 1) * share)
    if rank > count:
        needed = counted(math.ceil(share / (1 - share)), "labelled validation image")
        raise InputError(f"--coverage {coverage:g}: needs {needed}, and there are {count:,}; give a smaller coverage")
    return float(np.sort(probabilities)[count - rank])
