"""The usual objective: the loss of each example by its label."""

from jaxddp.engine.objective import supervised
from jaxddp.registry import OBJECTIVES

OBJECTIVES.add("supervised")(lambda config, topology: supervised)
