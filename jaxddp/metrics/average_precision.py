"""Mean average precision, exact."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.registry import METRICS


class MeanAveragePrecision:
    """The mean of the classes' average precisions, over the classes that occur.

    The average precision of a class is the sum of precision times gain in recall over all thresholds, without
    interpolation, as scikit-learn's `average_precision_score` defines it; equal scores share a threshold. Where an
    example may have several labels, a class's scores are its logits, and otherwise its probabilities, against all other
    classes. All scores of the set, N times K of 4 bytes, are held on the host.
    """

    takes_several = True

    def examples(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Scores and whether the example is of the class, [B, K] each; see `ExamplesMetric`."""
        if labels.ndim == 2:
            return {"scores": logits, "members": labels > 0.5}
        members = labels[:, None] == jnp.arange(logits.shape[-1])
        return {"scores": jax.nn.log_softmax(logits), "members": members}

    def finish(self, found: Any) -> Mapping[str, float]:
        scores, members = found["scores"], found["members"] > 0
        found_of = [average_precision(scores[:, k], members[:, k]) for k in np.flatnonzero(members.any(0))]
        return {"map": float(np.mean(found_of)) if found_of else float("nan")}


def average_precision(scores: np.ndarray, members: np.ndarray) -> float:
    """Of one class, of float[N] scores and bool[N], some of them true; NaN where a score is."""
    if np.isnan(scores).any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(members[order])
    # The last of equal scores.
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    precision = hits[ends] / (ends + 1)
    return float((precision * np.diff(hits[ends], prepend=0)).sum() / hits[-1])


METRICS.add("map")(MeanAveragePrecision())
