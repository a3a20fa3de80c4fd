"""What follows from a validation between two steps: parts of the step that it tells something, such as a plateau."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState, kept_types
from jaxddp.goal import named
from jaxddp.mesh import Topology

Follow = Callable[[TrainState, Mapping[str, float | None]], TrainState]
"""(state, `flat` metrics of its validation) -> the state that the next step takes; the same on every process."""


def make_follow(parts: Sequence[Part], topology: Topology) -> Follow:
    """Tell validations to the parts that follow them; of a step that has none the state stays as it is.

    Raises: InputError; when it is called, where a part changes what its arrays consist of.
    """
    following = [part for part in parts if part.follows]

    @jax.jit(out_shardings=topology.replicated)
    def told(own: dict[str, jax.Array], metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {part.name: part.validated(own[part.name], metrics) for part in following}

    def follow(state: TrainState, metrics: Mapping[str, float | None]) -> TrainState:
        if not following:
            return state
        values = {named(name): np.float32(np.nan if value is None else value) for name, value in metrics.items()}
        own = {part.name: state.parts[part.name] for part in following}
        told_of = state.replace(parts={**state.parts, **told(own, topology.replicate(values))})
        return kept_types(state, told_of, "what parts make of a validation")

    return follow


def rate_factor(parts: Sequence[Part], state: TrainState) -> float:
    """What the parts multiply the learning rate by."""
    factors = (part.rate_factor(state.parts.get(part.name)) for part in parts)
    return math.prod(float(factor) for factor in factors if factor is not None)
