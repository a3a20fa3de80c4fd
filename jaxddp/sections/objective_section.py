"""The `objective` section of a config: the function that a training step minimizes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxddp.registry import OBJECTIVES


@dataclass(frozen=True)
@OBJECTIVES.complete
class ObjectiveConfig:
    """The function that a training step minimizes. It includes the loss."""

    name: str = "supervised"
    """Name of an objective in jaxddp/objectives/: "supervised" (the loss on the labels), "distillation",
    "fixmatch" or "jensen_shannon"."""

    if TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any:
            """Return the value of a setting of a choice; see `Registry.complete`."""
