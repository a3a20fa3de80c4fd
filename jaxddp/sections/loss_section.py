"""The part of a config that says how logits are judged by labels."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.ranges import Positive, real_number
from jaxddp.core.wording import show
from jaxddp.overrides import checked

BALANCED: Literal["balanced"] = "balanced"


@dataclass(frozen=True)
class LossConfig:
    """How logits are judged by labels."""

    name: str = "cross_entropy"
    """Of a loss of jaxddp/losses/: "cross_entropy", "nll" of log-probabilities, or "bce" of each class by itself."""
    class_weights: str | None = None
    """How much each class counts: "1,4,0.5", a number above 0 for each in its order, or "balanced", N / (K n_k) for a
    class with n_k of the N training images. Evaluation weighs its loss alike."""

    @cached_property
    def weights(self) -> Literal["balanced"] | tuple[float, ...] | None:
        """What `class_weights` says. Raises: InputError; it says nothing."""
        if self.class_weights is None or self.class_weights == BALANCED:
            return self.class_weights
        key = "loss.class_weights"
        return tuple(checked(_number(word, key), Positive, key) for word in self.class_weights.split(","))


def _number(word: str, key: str) -> float:
    try:
        return real_number(word)
    except ValueError:
        told = f": {show(word)} is no number"
        raise InputError(Key(key), told, advice=f"give {BALANCED!r}, or a number for each class") from None
