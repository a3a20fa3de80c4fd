"""F1, the harmonic mean of precision and recall."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.registry import METRICS


class F1:
    """`f1`, the mean of the classes' F1, and `f1_micro`, that of all decisions together.

    Where an example may have several labels, a class is predicted by a positive logit, which is a probability above
    one half; otherwise the class of the largest logit is. A class without an example and without a prediction has 0.
    """

    takes_several = True

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """Of each class how often it was right, predicted and there, int32[K] each; see `SumsMetric`."""
        classes, real = jnp.arange(logits.shape[-1]), mask[:, None] > 0
        several = labels.ndim == 2
        there = real & (labels > 0.5 if several else labels[:, None] == classes)
        said = real & (logits > 0 if several else logits.argmax(-1)[:, None] == classes)
        columns = {"right": there & said, "predicted": said, "there": there}
        return {name: column.sum(0, dtype=jnp.int32) for name, column in columns.items()}

    def finish(self, found: Any) -> Mapping[str, float]:
        right, either = (np.asarray(each, np.int64) for each in (found["right"], found["predicted"] + found["there"]))
        of_class = np.divide(2 * right, either, out=np.zeros(len(right)), where=either > 0)
        micro = 2 * right.sum() / either.sum() if either.any() else 0.0
        return {"f1": float(of_class.mean()), "f1_micro": float(micro)}


METRICS.add("f1")(F1())
