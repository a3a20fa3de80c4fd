"""Statistics of predictions for labelled images: confusions, accuracy by class, and the most confident mistakes."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxddp.core.wording import counted, figure


class Confusion(NamedTuple):
    """The number of images of class `label` with the prediction `prediction`, and their share of the class."""

    label: int
    prediction: int
    images: int
    share: float


@dataclass(frozen=True)
class Outcome:
    """The predictions of N images out of K classes, with their labels.

    Images without a label, and images with a probability that is not finite, are excluded from the statistics.

    Attributes:
        labels: int[N]; negative if unknown.
        probabilities: float[N, K].
        class_names: the names of the K classes, for display.
        step: the step of the checkpoint.
    """

    labels: np.ndarray
    probabilities: np.ndarray
    class_names: tuple[str, ...]
    step: int

    def __repr__(self) -> str:
        accuracy = f"accuracy {figure('accuracy', self.accuracy)} of {counted(len(self.known), 'image')}"
        return f"Outcome(step {self.step:,}: {accuracy}, {counted(len(self.class_names), 'class')})"

    @cached_property
    def known(self) -> np.ndarray:
        """The rows that are not excluded, int64[M]."""
        return np.flatnonzero((self.labels >= 0) & np.isfinite(self.probabilities).all(1))

    @cached_property
    def predictions(self) -> np.ndarray:
        """The most probable class of each image, int64[N]; the first among equally probable classes."""
        return self.probabilities.argmax(1)

    @cached_property
    def confusion(self) -> np.ndarray:
        """int64[K, K]: the number of images of each class (row) that were predicted as each class (column)."""
        matrix = np.zeros((len(self.class_names),) * 2, np.int64)
        np.add.at(matrix, (self.labels[self.known], self.predictions[self.known]), 1)
        return matrix

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy; NaN without images."""
        return float(self.confusion.trace() / self.confusion.sum()) if len(self.known) else float("nan")

    @property
    def class_counts(self) -> np.ndarray:
        """The number of images of each class, int64[K]."""
        return self.confusion.sum(1)

    @property
    def class_accuracy(self) -> np.ndarray:
        """The accuracy of each class, float64[K]; NaN for a class without images."""
        counts = self.class_counts
        return np.divide(self.confusion.diagonal(), counts, out=np.full(len(counts), np.nan), where=counts > 0)

    def confusions(self, most: int) -> list[Confusion]:
        """Return the most frequent confusions. Equally frequent confusions are in the order of the classes."""
        wrong = self.confusion - np.diag(self.confusion.diagonal())
        order = np.argsort(-wrong, axis=None, kind="stable")[:most]
        labels, predictions = np.unravel_index(order, wrong.shape)
        return [
            Confusion(label, guess, int(wrong[label, guess]), float(wrong[label, guess] / self.class_counts[label]))
            for label, guess in zip(labels.tolist(), predictions.tolist(), strict=True)
            if wrong[label, guess]
        ]

    def surest_mistakes(self, most: int) -> np.ndarray:
        """Return the rows of the wrong predictions with the highest probabilities, int64[at most `most`]."""
        wrong = self.known[self.predictions[self.known] != self.labels[self.known]]
        return wrong[np.argsort(-self.probability(wrong), kind="stable")[:most]]

    def probability(self, rows: np.ndarray) -> np.ndarray:
        """Return the probability of the predicted class, float[n]."""
        return self.probabilities[rows, self.predictions[rows]]
