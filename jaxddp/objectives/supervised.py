"""The usual objective: the loss of each example by its label."""

from collections.abc import Callable

from jaxddp.config import Config
from jaxddp.engine.step_objective import Objective, TrainObjective, supervised
from jaxddp.mesh import Topology
from jaxddp.registry import OBJECTIVES


@OBJECTIVES.add("supervised")
def supervised_of(config: Config, topology: Topology) -> Callable[[Objective], TrainObjective]:
    """It has no settings."""
    return supervised
