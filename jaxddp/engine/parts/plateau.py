"""A learning rate that is lowered when the validation loss has stopped falling."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.core.ranges import HeldOut, Period, Share
from jaxddp.engine.parts.part import Part
from jaxddp.overrides import check_values

_THRESHOLD = 1e-4


@dataclass(frozen=True)
class Plateau(Part):
    """The rule of `optax.contrib.reduce_on_plateau` over the validations of a run, for any optimizer.

    The updates are multiplied by a factor, 1 at first. After `patience` validations in a row without gain it is
    multiplied by `factor`, and no less than `least`; then they are counted anew. A gain is a loss below the least one
    so far by a relative 1e-4, as with PyTorch's `ReduceLROnPlateau`, whose own patience is one validation longer. A
    loss that is not finite is no gain.

    Attributes:
        factor: above 0 and below 1.
        patience: at least 1.
        least: from 0 to 1.

    Raises:
        InputError: one of them is another.
    """

    factor: HeldOut = 0.1
    patience: Period = 10
    least: Share = 0.0
    name: str = "plateau"
    follows = True

    def __post_init__(self) -> None:
        check_values(self, "Plateau: ")

    @cached_property
    def _rule(self) -> optax.GradientTransformationExtraArgs:
        return optax.contrib.reduce_on_plateau(self.factor, self.patience, _THRESHOLD, min_scale=self.least)

    def init(self, params: Any, model_state: Any) -> Any:
        """{"rule": optax's state, whose `scale` is the factor, float32[]}."""
        rule: Any = self._rule.init(jnp.zeros((), jnp.float32))
        # It begins with infinity, and a state that holds one is not saved.
        return {"rule": rule._replace(best_value=jnp.float32(jnp.finfo(jnp.float32).max))}

    def rate_factor(self, own: Any) -> jax.Array:
        return own["rule"].scale

    def validated(self, own: Any, metrics: Mapping[str, jax.Array]) -> Any:
        _, rule = self._rule.update({}, own["rule"], value=metrics["val loss"])
        return {"rule": rule}
