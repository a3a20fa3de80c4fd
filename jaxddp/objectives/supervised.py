"""Supervised learning: the objective is the recipe's loss of the examples' labels."""

from collections.abc import Callable

from jaxddp.config import Config
from jaxddp.engine.objective import Objective, TrainObjective, supervised
from jaxddp.mesh import Topology
from jaxddp.registry import OBJECTIVES


@OBJECTIVES.add("supervised")
def supervised_of(config: Config, topology: Topology) -> Callable[[Objective], TrainObjective]:
    """Return the supervised objective, which has no settings."""
    return supervised
