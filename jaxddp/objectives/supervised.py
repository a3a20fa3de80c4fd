"""The usual objective: the loss of each example by its label."""

from collections.abc import Callable

from jaxddp.config import Config
from jaxddp.engine.objective import Objective, TrainObjective, supervised
from jaxddp.errors import InputError
from jaxddp.mesh import Topology
from jaxddp.registry import OBJECTIVES


@OBJECTIVES.add("supervised")
def supervised_of(config: Config, topology: Topology) -> Callable[[Objective], TrainObjective]:
    """Raises: InputError; there is a teacher, from whom it would learn nothing."""
    if config.objective.teacher is not None:
        raise InputError(
            f"objective.teacher={config.objective.teacher}: objective.name=supervised has none; set it to distillation"
        )
    return supervised
