"""The `parallel` section of a config: the devices of a run, and the time limits of a job."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxddp.core.duration import Duration
from jaxddp.core.ranges import CpuDevices, Devices, Range, Seconds
from jaxddp.registry import Requires
from jaxddp.shares import Shares


@dataclass(frozen=True)
class ParallelConfig:
    """The devices of the run, and the time limits of its job."""

    devices: Devices | None = None
    """Number of devices to use. If None, all."""
    cpu_devices: CpuDevices | None = None
    """Simulate this many CPU devices in each process."""
    buckets: Annotated[int, Range(1, 1024)] | None = None
    """Average gradients in at most this many all-reduces, each of which starts as soon as its gradients are ready. If
    None, 7 on GPUs, and otherwise 1."""
    shard_optimizer: bool = False
    """Divide the parameters and the optimizer's state among the devices between two steps (ZeRO stages 1 and 2). Each
    device updates its slices, which saves memory. Gradients are the same up to rounding."""
    groups: Annotated[int, Range(2, 100_000), Requires("train.sync_every")] | None = None
    """Number of groups of devices that average their parameters every `train.sync_every`. If None, each process is a
    group."""
    shares: str | None = None
    """Divide each batch among the devices by speed: "3,1" gives a number for each device or each process, and "auto"
    measures the speeds at the start of the run and keeps them. If None, all devices get equal parts."""
    reproducible: bool = False
    """Give the same bits on 1, 2, 4 and 8 devices: each batch is computed in 8 fixed shards, which are summed in a
    fixed order. This is slower."""
    xla_options: tuple[str, ...] = ()
    """XLA options for the compiled training step, as NAME=VALUE; see jaxddp/engine/compilation.py."""
    check_replicas: Duration = Duration.parse("1000 steps")
    """How often to compare the states of all devices. They are also compared before each checkpoint. "0 steps" disables
    the check."""
    self_test: Literal["auto", "always", "never"] = "auto"
    """Before the first step, compare the averaged gradient of a few examples with the gradient that one device
    computes. "auto" runs this test if it is expected to take less than a second."""
    start_timeout: Seconds = 60.0
    """Seconds that the processes of a job wait for each other at the start."""
    heartbeat_timeout: Seconds = 10.0
    """Seconds without a heartbeat after which a process is considered lost and the job ends."""
    stall_timeout: Seconds = 600.0
    """Seconds without progress after which a process is considered stuck and the run ends. Saving, restoring and
    validation may take 3 times as long; starting and compilation may take 6 times as long."""
    shutdown_timeout: Seconds = 60.0
    """Seconds that a process waits for the other processes at the end."""

    @property
    def division(self) -> Shares | None:
        """The parsed `shares`. Raises: InputError if the text is invalid."""
        return None if self.shares is None else Shares.parse(self.shares)
