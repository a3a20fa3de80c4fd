"""Exact mean average precision."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.registry import METRICS


class MeanAveragePrecision:
    """Mean average precision over the classes that occur.

    The average precision of a class is the sum of precision times the increase of recall over all thresholds, without
    interpolation, as in scikit-learn's `average_precision_score`. Equal scores share a threshold. Scores are logits if
    an example may have several labels, and log-probabilities otherwise. The host keeps all scores of the set in memory,
    N * K * 4 bytes.
    """

    takes_several = True

    def examples(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Return the scores, and the membership of each example in each class, [B, K] each; see `ExamplesMetric`."""
        if labels.ndim == 2:
            return {"scores": logits, "members": labels > 0.5}
        members = labels[:, None] == jnp.arange(logits.shape[-1])
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
    precision = hits[ends] / (ends + 1)
    return float((precision * np.diff(hits[ends], prepend=0)).sum() / hits[-1])


METRICS.add("map")(MeanAveragePrecision())
