"""F1, the harmonic mean of precision and recall."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.registry import METRICS


class F1:
    """`f1`, the mean of the classes' F1 scores, and `f1_micro`, the F1 score of the counts summed over the classes.

    If an example may have several labels, each positive logit (a probability above one half) predicts its class.
    Otherwise the largest logit predicts the class. A class without labels and predictions has no F1 score, and `f1` is
    the mean over the other classes: scikit-learn's `f1_score` with `zero_division=np.nan`, which for one label equals
    its default. A class that occurs only in the labels, or only in the predictions, has an F1 score of 0. Both numbers
    are NaN for a set without labels and predictions.
    """

    takes_several = True

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """Count for each class the right predictions, all predictions and the labels, int32[K]; see `SumsMetric`."""
        classes, real = jnp.arange(logits.shape[-1]), mask[:, None] > 0
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


METRICS.add("f1")(F1())
