"""The outer optimizer: what groups of devices do with the average of their parameters."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxddp.config import Config

ANCHOR, OPT_STATE = "anchor", "opt_state"


@dataclass(frozen=True)
class OuterOptimizer:
    """Continues from the average of the groups' parameters, or moves to it with Nesterov momentum.

    Without momentum the groups continue from the average (local SGD: Stich 2018, arXiv:1805.09767). With momentum, the
    difference between the parameters after the last average, the anchor, and the new average is the gradient of SGD
    with Nesterov momentum, which updates the anchor, and the groups continue from it (DiLoCo: Douillard et al. 2023,
    arXiv:2311.08105).

    Attributes:
        learning_rate: the learning rate of the momentum's update; not used without momentum.
        momentum: None for no momentum.
    """

    learning_rate: float = 1.0
    momentum: float | None = None

    @classmethod
    def of(cls, config: Config) -> "OuterOptimizer":
        """Return the outer optimizer of a config."""
        if config.train.outer_optimizer == "mean":
            return cls()
        return cls(config.train.outer_rate, config.train.outer_momentum)

    def init(self, params: Any) -> dict[str, Any]:
        """Return the state of the outer optimizer for the initial trained parameters."""
        if self.momentum is None:
            return {}
        # Copy, because a donated state must not hold a buffer twice.
        return {ANCHOR: jax.tree.map(jnp.copy, params), OPT_STATE: self._rule.init(params)}

    def update(self, own: dict[str, Any], mean: Any) -> tuple[dict[str, Any], Any]:
        """Return the next state, and the parameters from which all groups continue.

        Args:
            own: the state, of `init` or of the last update.
            mean: the average of the groups' trained parameters.
        """
        if self.momentum is None:
            return own, mean
        anchor = own[ANCHOR]
        gradient = jax.tree.map(jnp.subtract, anchor, mean)
        updates, opt_state = self._rule.update(gradient, own[OPT_STATE], anchor)
        params = optax.apply_updates(anchor, updates)
        return {**own, ANCHOR: params, OPT_STATE: opt_state}, params

    @property
    def _rule(self) -> optax.GradientTransformation:
        return optax.sgd(self.learning_rate, self.momentum, nesterov=True)
