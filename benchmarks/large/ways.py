"""The projected step of a large job, in each way to share the work. Nothing above 16 devices was run.

Devices are H200s in hosts of eight. The time of a message is that of `benchmarks.programs.communication`. The times of
the backward pass and of buckets are those of `benchmarks.large.buckets`, which also decides the number of buckets.

- All-reduce: as in `jaxddp.engine.gradients`. `SMALL` is the number of buckets of jobs of one or two hosts.
- Sharded optimizer: reduce-scatters in buckets, and all-gathers of the parameters at the start of the step, in the
  order in which the forward pass uses them. Each takes half of the time of a ring all-reduce; NCCL has no trees for
  them. Each bucket's part of the forward pass, of equal length, waits for its all-gather.
- Meetings: groups of devices average their gradients in each step, and all groups average their parameters every
  `EVERY` steps, which nothing hides (DiLoCo, arXiv:2311.08105). The state has two more arrays for each parameter: the
  parameters of the last meeting, and the outer momentum.
- Unequal devices: with equal shares a step takes the time of the slowest device, and with shares in proportion to the
  speeds that of the mean speed.
- Stragglers: the time of each device varies from step to step with a normal distribution, and a step waits for the
  slowest one.

The bytes are those that a device sends in a step, by rings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from benchmarks.large.buckets import WINDOW, best_count, exposed_seconds
from benchmarks.large.networks import Network
from benchmarks.programs.communication import DGX_H200, Interconnect
from jaxddp.platforms import PLATFORMS

SMALL = PLATFORMS["gpu"].buckets
HOST = DGX_H200.devices
GROUPS = {"hosts": HOST, "groups of 64 hosts": 64 * HOST}
EVERY = (10, 50)
DECIDED = "all-reduces by the model"
RINGS = replace(DGX_H200, has_trees=False)
FORWARD = 1 / 3
"""The fraction of a step's computation in the forward pass; see `benchmarks.large.buckets`."""
OUTER_ARRAYS = 2


@dataclass(frozen=True)
class Step:
    """A projected step.

    Attributes:
        way: how the devices share the work.
        images: images on each device.
        compute: seconds of a step without communication.
        exposed: seconds of communication that computation does not hide, and of buckets.
        within: bytes that a device sends within its host.
        between: bytes that a device sends to other hosts.
        state: bytes of a device's parameters, optimizer state and model state.
        buckets: the number of all-reduces or reduce-scatters.
    """

    network: str
    way: str
    devices: int
    images: int
    compute: float
    exposed: float
    within: float
    between: float
    state: float
    buckets: int

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed

    @property
    def efficiency(self) -> float:
        """The speed relative to as many devices that do not communicate, 0 to 1."""
        return self.compute / self.seconds

    @property
    def images_per_second(self) -> float:
        return self.devices * self.images / self.seconds


def steps(network: Network, devices: int, images: int) -> list[Step]:
    """Return the steps of all ways."""
    small, decided = (all_reduce(network, devices, images, few) for few in (SMALL, None))
    return [small, decided, sharded(network, devices, images)] + [
        meetings(network, devices, images, size, name, every)
        for name, size in GROUPS.items()
        for every in EVERY
        if size < devices
    ]


def all_reduce(
    network: Network, devices: int, images: int, buckets: int | None = None, links: Interconnect = DGX_H200
) -> Step:
    """Return a step with one average over all devices.

    Args:
        buckets: the number of all-reduces. Default: the number that the model decides.
    """
    compute = network.compute(images)
    arguments = network.bytes, WINDOW * compute, lambda size: links.all_reduce(size, devices)
    count = best_count(SMALL, *arguments) if buckets is None else buckets
    exposed = max(0.0, exposed_seconds(count, *arguments)) if devices > 1 else 0.0
    way = DECIDED if buckets is None else f"{buckets} all-reduces"
    sent = sent_bytes(network.bytes, devices)
    return Step(network.title, way, devices, images, compute, exposed, *sent, network.state_bytes, count)


def sharded(network: Network, devices: int, images: int) -> Step:
    """Return a step with a sharded optimizer."""
    compute = network.compute(images)
    half: Callable[[float], float] = lambda size: DGX_H200.reduce_scatter(size, devices)  # noqa: E731
    arguments = network.bytes, WINDOW * compute, half
    count = best_count(SMALL, *arguments)
    exposed = exposed_seconds(count, *arguments) + gather_seconds(count, network.bytes, FORWARD * compute, half)
    exposed = max(0.0, exposed) if devices > 1 else 0.0
    sent = sent_bytes(network.bytes, devices)
    state = network.sharded_state_bytes(devices)
    return Step(network.title, "sharded optimizer", devices, images, compute, exposed, *sent, state, count)


def gather_seconds(count: int, num_bytes: float, forward: float, all_gather: Callable[[float], float]) -> float:
    """Return the seconds by which `count` all-gathers lengthen a forward pass of `forward` seconds.

    The parameters that are used first are the smallest part, as their gradients are ready last.
    """
    gathered = computed = 0.0
    for number in range(count, 0, -1):
        gathered += all_gather(num_bytes / 2 ** min(number, count - 1))
        computed = max(gathered, computed) + forward / count
    return computed - forward


def meetings(network: Network, devices: int, images: int, size: int, name: str, every: int) -> Step:
    """Return a step of groups of `size` devices that average their parameters every `every` steps."""
    group = all_reduce(network, size, images)
    meeting = DGX_H200.all_reduce(network.bytes, devices) / every
    here, far = sent_bytes(network.bytes, devices)
    outside = group.between + far / every
    within = group.within + here / every
    state = network.state_bytes + OUTER_ARRAYS * network.bytes
    way = f"{name}, every {every} steps"
    times_and_bytes = {"exposed": group.exposed + meeting, "within": within, "between": outside}
    return replace(group, way=way, devices=devices, state=state, **times_and_bytes)


def sent_bytes(num_bytes: float, devices: int) -> tuple[float, float]:
    """Return the bytes that a device sends within its host and to other hosts, for an all-reduce of `num_bytes`."""
    hosts, here = DGX_H200.hosts(devices), min(HOST, devices)
    return 2 * (here - 1) / here * num_bytes, 2 * (hosts - 1) / hosts * num_bytes / here


# --- Unequal devices and stragglers ---


def gain_of_shares(fleet: Sequence[tuple[float, float]]) -> float:
    """Return the speed of shares in proportion to the speeds, relative to equal shares.

    Args:
        fleet: (fraction of the devices, speed) of each kind of device. The fractions sum to 1.
    """
    return sum(fraction * speed for fraction, speed in fleet) / min(speed for _, speed in fleet)


def straggling(devices: int, variation: float) -> float:
    """Return the mean time of the slowest of `devices`, relative to the mean time of one.

    The expected maximum of n values of a normal distribution is about its quantile at (n - 0.375) / (n + 0.25) (Blom
    1958, "Statistical estimates and transformed beta-variables").

    Args:
        variation: the standard deviation of a device's time, relative to its mean.
    """
    if devices == 1:
        return 1.0
    return 1 + variation * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def straggling_of_groups(devices: int, size: int, every: int, variation: float) -> float:
    """Return `straggling` of groups of `size` devices that meet every `every` steps.

    In each step a group waits for its slowest device. The mean over the steps between two meetings varies less, and all
    groups wait for the slowest mean.
    """
    between = straggling(devices // size, variation / every**0.5) - 1
    return straggling(size, variation) + between
