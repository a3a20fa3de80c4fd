"""Expected calibration error."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxddp.metrics.top_k import TopK
from jaxddp.registry import METRICS


@dataclass(frozen=True)
class CalibrationError:
    """Expected calibration error (Guo et al. 2017, arXiv:1706.04599).

    The probabilities of the predicted classes are divided into `bins` of equal width, ((m - 1) / bins, m / bins]. The
    error is the mean, over all examples, of the absolute difference between mean probability and accuracy in the
    example's bin.
    """

    bins: int = 15

    def examples(self, logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        """Return each prediction's probability, and 1 if it is right, float32[B] each; see `ExamplesMetric`."""
        return {"confidence": jax.nn.softmax(logits).max(-1), "right": TopK(1)(logits, labels)}

    def finish(self, found: Any) -> Mapping[str, float]:
        confidence, right = (np.asarray(found[key], np.float64) for key in ("confidence", "right"))
        if not np.isfinite(confidence).all() or not len(confidence):
            return {"ece": float("nan")}
        indices = np.ceil(confidence * self.bins).astype(np.int64).clip(1, self.bins) - 1
        gaps = np.bincount(indices, weights=right - confidence, minlength=self.bins)
        return {"ece": float(np.abs(gaps).sum() / len(confidence))}


METRICS.add("ece")(CalibrationError())
