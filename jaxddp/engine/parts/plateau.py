"""Lower the learning rate when the validation loss no longer falls."""

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
    """Applies the rule of `optax.contrib.reduce_on_plateau` to the validations of a run, for any optimizer.

    Updates are multiplied by a scale, which starts at 1. After `patience` validations in a row without improvement the
    scale is multiplied by `factor`, down to `least`, and the count of validations starts again. A validation is an
    improvement if its loss is below the best loss by a relative 1e-4, as in PyTorch's `ReduceLROnPlateau`. (With the
    same patience, PyTorch waits one validation longer.) A loss that is not finite is no improvement.

    Attributes:
        factor: the factor of each reduction, above 0 and below 1.
        patience: the number of validations without improvement before a reduction, at least 1.
        least: the smallest scale, from 0 to 1.

    Raises:
        InputError: a value is out of range.
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
        """Return {"rule": optax's state}. Its `scale`, float32[], is the factor of the learning rate."""
        rule: Any = self._rule.init(jnp.zeros((), jnp.float32))
        # Optax starts with infinity as the best loss, but a part's arrays with an infinity are not saved.
        return {"rule": rule._replace(best_value=jnp.float32(jnp.finfo(jnp.float32).max))}

    def rate_factor(self, own: Any) -> jax.Array:
        return own["rule"].scale

    def validated(self, own: Any, metrics: Mapping[str, jax.Array]) -> Any:
        _, rule = self._rule.update({}, own["rule"], value=metrics["val loss"])
        return {"rule": rule}
