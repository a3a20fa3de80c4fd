"""A generation: the processes of a job between two starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxddp.cluster.restarts import End


@dataclass(frozen=True)
class Generation:
    """The machines of a generation, and how their processes ended.

    Attributes:
        number: the number of the generation, from 0; -1 before the first generation.
        members: the machines of the generation.
        ends: how the processes of each member ended, for the members whose processes have ended.
        failure: the first failure of any member.
        growing: whether all processes were asked to save and stop, so that the next generation has more machines.
    """

    number: int = -1
    members: tuple[int, ...] = ()
    ends: Mapping[int, End] = field(default_factory=dict)
    failure: End | None = None
    growing: bool = False

    @property
    def pending(self) -> set[int]:
        """The members whose processes have not ended. It is empty unless the stage is "running"."""
        return set(self.members) - self.ends.keys()

    def with_end(self, machine: int, end: End) -> "Generation":
        """Return the generation after the processes of a machine have ended."""
        return replace(self, ends={**self.ends, machine: end})

    def following(self, members: tuple[int, ...]) -> "Generation":
        """Return the next generation, whose processes run on these machines."""
        return Generation(self.number + 1, members)
