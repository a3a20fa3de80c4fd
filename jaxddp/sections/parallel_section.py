"""The part of a config that says on what a run trains."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxddp.core.duration import Duration
from jaxddp.core.ranges import CpuDevices, Devices, Range, Seconds


@dataclass(frozen=True)
class ParallelConfig:
    """On what it runs; never part of the recipe."""

    devices: Devices | None = None
    """Use this many devices of all; all where absent."""
    cpu_devices: CpuDevices | None = None
    """Simulate this many devices on the CPU, in each process."""
    buckets: Annotated[int, Range(1, 1024)] | None = None
    """Average gradients in at most this many all-reduces, each of which starts when its gradients are ready. Where
    absent, 7 on several GPUs and 1 elsewhere."""
    reproducible: bool = False
    """The same bits on 1, 2, 4 and 8 devices: a batch is computed in 8 fixed shards, which are summed in a fixed order.
    It takes longer."""
    xla_options: tuple[str, ...] = ()
    """XLA's options for the compiled training step, as NAME=VALUE; see jaxddp/engine/compiler_options.py."""
    check_replicas: Duration = field(default_factory=lambda: Duration.parse("1000 steps"))
    """How often to compare the state of all devices, beside the times at which it is saved; "0 steps" never does."""
    self_test: Literal["auto", "always", "never"] = "auto"
    """Before the first step, compare the averaged gradient of a few examples with that of one device; "auto" where
    that is expected to take less than a second."""
    start_timeout: Seconds = 60.0
    """Seconds that the processes of a job wait for each other at the start."""
    heartbeat_timeout: Seconds = 10.0
    """Seconds without a sign of life after which a process counts as lost, and the job ends."""
    stall_timeout: Seconds = 600.0
    """Seconds without progress after which a process that is alive counts as stuck, and the run ends; saving, restoring
    and validating have 3 times as many, starting and compiling 6 times."""
    shutdown_timeout: Seconds = 60.0
    """Seconds that a process waits for the others at the end."""
