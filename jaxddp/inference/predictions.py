"""The predictions of a trained network for images, and their statistics if the images have labels."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxddp.config.values import checked
from jaxddp.core.errors import InputError, counted, figure, not_installed, some

OutputCell = str | float | None
OutputRow = dict[str, OutputCell]
_OF_A_CLASS = ("class", "probability")
_NOT_FINITE = "the network's output is not finite"


def column_names(top: int) -> list[str]:
    """Return `id,class,probability,class_2,probability_2,…,error`."""
    of_classes = [f"{name}_{place}" if place > 1 else name for place in range(1, top + 1) for name in _OF_A_CLASS]
    return ["id", *of_classes, "error"]


@dataclass(frozen=True)
class Predictions:
    """The predictions of N images out of K classes.

    Attributes:
        ids: the ids of the N images, such as file names.
        probabilities: float32[N, K], in the order of the classes; NaN for an image that cannot be used.
        class_ids: the ids of the K classes, by which data sets are compared, such as folder names.
        class_names: the names of the K classes, for display.
        errors: the faults of unusable images, by row.
    """

    ids: Sequence[str]
    probabilities: np.ndarray
    class_ids: Sequence[str]
    class_names: Sequence[str]
    errors: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        classes = f"{counted(len(self.class_names), 'class')} ({some(self.class_names)})"
        unusable = f", {len(self.errors):,} cannot be used" if self.errors else ""
        return f"Predictions({counted(len(self), 'image')} of {classes}{unusable})"

    @cached_property
    def labels(self) -> np.ndarray:
        """int32[N], the most probable class; -1 for an image that cannot be used."""
        return np.where(self._known, self._sorted[:, 0], -1).astype(np.int32)

    @property
    def classes(self) -> list[str | None]:
        """The name of each image's most probable class."""
        return [self.class_names[int(label)] if label >= 0 else None for label in self.labels]

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the k most probable classes, int64[N, k], and their probabilities, float32[N, k].

        Equally probable classes are in their original order. Raises: InputError if there are fewer than k classes.
        """
        if not 1 <= checked(k, int, "k") <= len(self.class_ids):
            raise InputError(f"k={k}: expected 1 to {len(self.class_ids)}, the number of classes")
        labels = self._sorted[:, :k]
        return labels, np.take_along_axis(self.probabilities, labels, 1)

    def rows(self, top: int = 5) -> Iterator[OutputRow]:
        """Yield a row of `column_names` for each image: class ids, and probabilities with all digits of a float32."""
        top = min(checked(top, int, "top"), len(self.class_ids))
        columns, (labels, shares) = column_names(top), self.top(top)
        for row, identity in enumerate(self.ids):
            error = self.errors.get(row) or (None if self._known[row] else _NOT_FINITE)
            cells: list[OutputCell] = [None] * (len(columns) - 2)
            if error is None:
                cells[::2] = [self.class_ids[int(label)] for label in labels[row]]
                # The shortest decimal that rounds to this float32.
                cells[1::2] = [float(str(share)) for share in shares[row]]
            yield dict(zip(columns, (identity, *cells, error), strict=True))

    def to_frame(self, top: int = 5) -> Any:
        """Return `rows` as a pandas DataFrame. Raises: InputError if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise InputError(f"to_frame: {not_installed('pandas', 'pandas')}") from None
        return pandas.DataFrame([*self.rows(top)], columns=column_names(min(top, len(self.class_ids))))

    @cached_property
    def _known(self) -> np.ndarray:
        """bool[N]: whether the probabilities of the image are finite."""
        return np.asarray(np.isfinite(self.probabilities).all(1))

    @cached_property
    def _sorted(self) -> np.ndarray:
        return np.argsort(-self.probabilities, axis=1, kind="stable")


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
