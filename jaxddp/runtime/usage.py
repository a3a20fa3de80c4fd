"""How well the steps of a run use the devices."""

from dataclasses import dataclass

from jaxddp.engine.cost import Program
from jaxddp.parallel.topology import Topology
from jaxddp.runtime.records import Used


@dataclass(frozen=True)
class Usage:
    """Asked at a record. Figures that nobody knows (a CPU's peak; anything before the first step) are None."""

    program: Program
    topology: Topology
    batch_size: int

    def __call__(self, images_per_second: float | None) -> Used:
        """What is used at a speed, over all devices. The memory is that of this process's own devices."""
        cost, memory = self.program.cost, self.topology.peak_memory()
        if cost is None:
            return Used(peak_memory=memory)
        utilization = None
        if images_per_second:
            seconds = self.batch_size / images_per_second
            utilization = cost.utilization(seconds, self.topology.num_devices, self.topology.device_kind)
        return Used(cost.flops, utilization, memory)
