"""How well the steps of a run use the devices."""

from dataclasses import dataclass
from typing import Protocol

from jaxddp.measure.cost import Cost
from jaxddp.mesh import Topology


@dataclass(frozen=True)
class Used:
    """What the steps ask of the devices, and how much of them they use; None where that is unknown."""

    flops_per_step: int | None = None
    """Floating-point operations over all devices."""
    flops_utilization: float | None = None
    """Model FLOP utilization: their share of what the devices could do at their peak."""
    peak_memory: int | None = None
    """The most bytes that a device of the first process has held so far; see `Topology.peak_memory`."""


UNKNOWN = Used()


class Costed(Protocol):
    """A program that knows what it costs once it is compiled."""

    cost: Cost | None


@dataclass(frozen=True)
class Usage:
    """What a program uses at a speed."""

    program: Costed
    topology: Topology
    batch_size: int

    def __call__(self, images_per_second: float | None) -> Used:
        cost, memory = self.program.cost, self.topology.peak_memory()
        if cost is None:
            return Used(peak_memory=memory)
        utilization = None
        if images_per_second:
            seconds = self.batch_size / images_per_second
            utilization = cost.utilization(seconds, self.topology.num_devices, self.topology.device_kind)
        return Used(cost.flops, utilization, memory)
