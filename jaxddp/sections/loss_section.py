"""The `loss` section of a config: the loss function and the weights of classes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jaxddp.core.errors import InputError, Key
from jaxddp.core.ranges import Positive, real_number
from jaxddp.core.wording import show
from jaxddp.overrides import checked
from jaxddp.registry import LOSSES

BALANCED: Literal["balanced"] = "balanced"


@dataclass(frozen=True)
@LOSSES.complete
class LossConfig:
    """The loss function and the weights of classes."""

    name: str = "cross_entropy"
    """Name of a loss in jaxddp/losses.py: "cross_entropy", "nll" (for log-probabilities) or "bce" (one binary decision
    per class)."""
    class_weights: str | None = None
    """Weight of each class in the loss, in training and evaluation: "1,4,0.5" lists one positive number per class;
    "balanced" is N / (K n_k) for a class with n_k of the N training images and K classes."""

    @cached_property
    def weights(self) -> Literal["balanced"] | tuple[float, ...] | None:
        """The parsed `class_weights`. Raises: InputError if the text is invalid."""
        if self.class_weights is None or self.class_weights == BALANCED:
            return self.class_weights
        key = "loss.class_weights"
        return tuple(checked(_number(word, key), Positive, key) for word in self.class_weights.split(","))


def _number(word: str, key: str) -> float:
    try:
        return real_number(word)
    except ValueError:
        problem = f": {show(word)} is not a number"
        raise InputError(Key(key), problem, advice=f"give {BALANCED!r}, or a number for each class") from None
