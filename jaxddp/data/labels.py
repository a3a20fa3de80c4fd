"""The labels of a source: one class an example, or several."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxddp.data.source import Source


def is_multi_label(source: "Source") -> bool:
    """Whether an example may have several labels."""
    return source.labels.ndim == 2


def classes_of(source: "Source", row: int) -> np.ndarray:
    """Of which classes a row is, bool[K]."""
    label = source.labels[row]
    return label > 0 if is_multi_label(source) else np.arange(source.num_classes) == label


def class_counts(source: "Source") -> np.ndarray:
    """How many examples of each class there are, int64[K]; one of several classes counts for each."""
    if is_multi_label(source):
        return source.labels.sum(0, dtype=np.int64)
    return np.bincount(source.labels[source.labels >= 0], minlength=source.num_classes)
