"""A model of the time of an all-reduce, from the bandwidth and the latency of the links between devices.

A ring of n peers sends 2 (n - 1) messages of S / n bytes, one after the other (Patarasuk and Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002). With bandwidth B and latency a of a link:

    ring(S, n) = 2 (n - 1) (S / (n B) + a)

Two binary trees, each of which carries half of the bytes, send every byte up and down (Sanders, Speck and Träff 2009,
doi:10.1016/j.parco.2009.09.001; NCCL since 2.4). NCCL assumes that trees reach 92% of the bandwidth of a link
(`ncclTopoTuneModel` in src/graph/tuning.cc of NCCL 2.30):

    tree(S, n) = 2 (ceil(log2 n) a + S / (0.92 B))

On H hosts with D devices each, the devices of a host first reduce-scatter (the first half of a ring). Then each device
all-reduces its slice, S / D, with its counterparts on the other hosts, by a ring or by trees, whichever takes less
time, as NCCL chooses. Last, the devices of a host all-gather (the second half of the first ring):

    all_reduce(S) = ring(S, D) + min(ring(S / D, H), tree(S / D, H))

The model has no stragglers, no links that jobs share, and no kernels that a collective slows down.

The links of `DGX_H200`:
- NVLink 4 has 900 GB/s for each GPU in both directions, and a DGX H200 has an adapter of 400 Gb/s for each GPU
  (NVIDIA's data sheet "DGX H200").
- An assumption: 80% of either bandwidth is reached.
- The latencies are NCCL's for the protocol Simple (`hwLatencies` in the same file): 3.4 us for a step of a ring over
  NVLink, 14 us for a step of a ring or a tree over the network.
"""

import math
from dataclasses import dataclass, replace

SHARE_OF_BANDWIDTH = 0.8
_SHARE_OF_TREES = 0.92


@dataclass(frozen=True)
class Link:
    """A network link: bytes per second in one direction, and the seconds of an empty message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Interconnect:
    """The links of hosts with `devices` devices each.

    Attributes:
        inside: the links within a host.
        outside: the links between hosts, one for each device.
        has_trees: whether the library for collectives uses trees between hosts.
    """

    devices: int
    inside: Link
    outside: Link
    has_trees: bool = True

    def hosts(self, num_devices: int) -> int:
        """Return the number of hosts of `num_devices`: a part of one host, or whole hosts.

        Raises:
            ValueError: the number is below one, or above a host and not a multiple of it.
        """
        if num_devices < 1 or num_devices % min(self.devices, num_devices):
            raise ValueError(f"{num_devices} devices: expected 1 to {self.devices}, or a multiple of {self.devices}")
        return num_devices // min(self.devices, num_devices)

    def all_reduce(self, num_bytes: float, num_devices: int, hosts: int | None = None) -> float:
        """Return the seconds of an all-reduce of `num_bytes` on each device; 0 for one device.

        Args:
            hosts: the number of hosts, on which the devices are spread evenly. Default: as few as possible.

        Raises:
            ValueError: see `hosts`.
        """
        hosts = self.hosts(num_devices) if hosts is None else hosts
        here = num_devices / hosts
        between = ring(num_bytes / here, hosts, self.outside)
        if self.has_trees:
            between = min(between, tree(num_bytes / here, hosts, self.outside))
        return ring(num_bytes, here, self.inside) + between

    def reduce_scatter(self, num_bytes: float, num_devices: int, hosts: int | None = None) -> float:
        """Return the seconds of a reduce-scatter of `num_bytes`, or of an all-gather to `num_bytes`.

        It is a half of an all-reduce by rings, because NCCL has no trees for it. Args and errors: see `all_reduce`.
        """
        return replace(self, has_trees=False).all_reduce(num_bytes, num_devices, hosts) / 2


DGX_H200 = Interconnect(
    devices=8,
    inside=Link(SHARE_OF_BANDWIDTH * 450e9, 3.4e-6),
    outside=Link(SHARE_OF_BANDWIDTH * 50e9, 14e-6),
)


def ring(num_bytes: float, peers: float, link: Link) -> float:
    """Return the seconds of a ring all-reduce of `num_bytes`; 0 for one peer."""
    return 2 * (peers - 1) * (num_bytes / (peers * link.bandwidth) + link.latency)


def tree(num_bytes: float, peers: int, link: Link) -> float:
    """Return the seconds of an all-reduce of `num_bytes` over two binary trees; 0 for one peer."""
    if peers == 1:
        return 0.0
    return 2 * (math.ceil(math.log2(peers)) * link.latency + num_bytes / (_SHARE_OF_TREES * link.bandwidth))
