"""A slow network between two hosts: two TUN devices whose packets are delayed, and sent at a limited rate.

`slow_network.py` starts this script and moves the devices into its network namespaces. Linux's own `netem` does the
same, but is a kernel module that containers and small virtual machines often lack. Needs root and /dev/net/tun.
"""

import argparse
import contextlib
import fcntl
import heapq
import os
import selectors
import struct
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LONGEST_PACKET = 1 << 16
_MOST_QUEUED_BYTES = 4 << 20
"""A longer queue loses packets, as a router's does. TCP sends at most its window, which is smaller."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs=2)
    parser.add_argument("--rate", type=float, required=True, help="bits a second in each direction")
    parser.add_argument("--delay", type=float, required=True, help="seconds in each direction")
    options = parser.parse_args()
    ends = [open_tun(name) for name in options.devices]
    print("ready", flush=True)
    forward(ends, options.rate / 8, options.delay)


def open_tun(name: str) -> int:
    """Create a TUN device, and return the file descriptor of its packets."""
    opened = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(opened, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return opened


def forward(ends: list[int], bytes_per_second: float, delay: float) -> None:
    """Pass the packets of each device to the other one, forever."""
    selector, other = selectors.DefaultSelector(), {ends[0]: ends[1], ends[1]: ends[0]}
    for end in ends:
        selector.register(end, selectors.EVENT_READ)
    arriving: list[tuple[float, int, int, bytes]] = []
    free_at, number = dict.fromkeys(ends, 0.0), 0
    while True:
        wait = None if not arriving else max(0.0, arriving[0][0] - time.monotonic())
        for key, _ in selector.select(wait):
            packet, now = os.read(key.fd, _LONGEST_PACKET), time.monotonic()
            begin = max(now, free_at[key.fd])
            if (begin - now) * bytes_per_second > _MOST_QUEUED_BYTES:
                continue
            free_at[key.fd] = begin + len(packet) / bytes_per_second
            number += 1
            heapq.heappush(arriving, (free_at[key.fd] + delay, number, other[key.fd], packet))
        while arriving and arriving[0][0] <= time.monotonic():
            *_, end, packet = heapq.heappop(arriving)
            # If the device is not up yet, the packet is lost.
            with contextlib.suppress(OSError):
                os.write(end, packet)


if __name__ == "__main__":
    main()
