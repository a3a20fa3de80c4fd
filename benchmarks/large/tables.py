"""The tables of the projection, for the terminal and for the page docs/large-jobs.md."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.large.failures import HOURS_OF_A_DEVICE, failures, restart_seconds, spare_share
from benchmarks.large.networks import Network
from benchmarks.large.ways import (
    DECIDED,
    EVERY,
    RINGS,
    SMALL,
    Step,
    all_reduce,
    gain_of_shares,
    steps,
    straggling,
    straggling_of_groups,
)
from benchmarks.programs.communication import DGX_H200

LARGEST_BATCH = 32_768
"""The largest global batch of a shipped config, imagenet_resnet50_lars (You et al. 2017, arXiv:1708.03888)."""
MOST_IMAGES = 256
DEVICES = (8, 16, 64, 512, 4096, 32_768, 100_000)
FLEETS = {
    "a half at half of the speed": ((0.5, 1.0), (0.5, 0.5)),
    "an eighth at half of the speed": ((0.875, 1.0), (0.125, 0.5)),
    "a half A100s, a half H200s, by their peak rates": ((0.5, 989.5), (0.5, 312.0)),
}
VARIATIONS = (0.01, 0.03)
_TABLE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def images_of(devices: int, batch: int | None) -> int:
    """Return the images on each device: at most 256, and at most those of a global batch."""
    return MOST_IMAGES if batch is None else min(MOST_IMAGES, batch // devices)


def sizes(devices: Iterable[int]) -> list[tuple[int, int]]:
    """Return (devices, images) with 256 images on each device, and with the largest global batch."""
    pairs = [(count, images_of(count, batch)) for count in devices for batch in (None, LARGEST_BATCH)]
    return [pair for pair in dict.fromkeys(pairs) if pair[1]]


def buckets(network: Network) -> str:
    """Return the table of the numbers of all-reduces, with NCCL's choice of rings or trees, and with rings alone."""

    def cells(devices: int, images: int) -> list[str]:
        choices = [
            all_reduce(network, devices, images, few, links) for links in (DGX_H200, RINGS) for few in (SMALL, None)
        ]
        before, after, before_rings, after_rings = (f"{step.efficiency:.3f}" for step in choices)
        number, number_rings = choices[1].buckets, choices[3].buckets
        return [f"{devices:,}", f"{images}", before, f"{number}", after, before_rings, f"{number_rings}", after_rings]

    names = ("rings or trees", "rings alone")
    heads = [
        f"{name}: {head}" for name in names for head in (f"{SMALL} all-reduces", "model's number", "its efficiency")
    ]
    return _table(["devices", "images a device", *heads], [cells(*pair) for pair in sizes((16, 64, 512, 4096))])


def speeds(network: Network) -> str:
    """Return the table of steps a second and efficiencies, with a column for each way."""
    rows = {pair: {step.way: step for step in steps(network, *pair)} for pair in sizes((8, 64, 512, 4096, 100_000))}
    ways = list(dict.fromkeys(way for row in rows.values() for way in row))

    def cell(step: Step | None) -> str:
        return "" if step is None else f"{1 / step.seconds:.2f} ({step.efficiency:.3f})"

    lines = [[f"{d:,}", f"{i}", *(cell(row.get(way)) for way in ways)] for (d, i), row in rows.items()]
    return _table(["devices", "images a device", *ways], lines)


def bytes_and_memory(networks: Sequence[Network]) -> str:
    """Return the table of the bytes that a device sends in a step, and of its state, in MB."""

    def cells(network: Network, devices: int) -> list[str]:
        of_way = {step.way: step for step in steps(network, devices, MOST_IMAGES)}
        whole, parts = of_way[DECIDED], of_way["sharded optimizer"]
        met = [of_way.get(f"hosts, every {every} steps") for every in EVERY]
        far = [None if step is None else step.between for step in (whole, *met)]
        state = [whole.state, parts.state, None if met[0] is None else met[0].state]
        return [network.title, f"{devices:,}", *map(_megabytes, (whole.within, *far, *state))]

    heads = ["network", "devices", "sent within the host", "to other hosts"]
    heads += [f"to other hosts: hosts, every {every} steps" for every in EVERY]
    heads += ["state", "state: sharded optimizer", "state: meetings"]
    return _table(heads, [cells(network, count) for network in networks for count in DEVICES])


def interruptions(networks: Sequence[Network]) -> str:
    """Return the table of failures, checkpoints and restarts."""

    def cells(devices: int) -> list[str]:
        each = {name: [failures(devices, n.state_bytes, name) for n in networks] for name in HOURS_OF_A_DEVICE}
        hours = [f"{known[0].between / 3600:,.2f}" for known in each.values()]
        intervals = [f"{known.interval:,.0f}" for known in each["Llama 3"]]
        restarts = [f"{restart_seconds(devices, n.state_bytes):.0f}" for n in networks]
        lost = [" to ".join(f"{known[place].lost:.2%}" for known in each.values()) for place in range(len(networks))]
        return [f"{devices:,}", *hours, *intervals, *restarts, *lost]

    heads = ["devices", "hours between failures, by Llama 3", "by RSC-1"]
    for name in ("seconds between checkpoints", "seconds of a restart", "time lost"):
        heads += [f"{name}: {network.title}" for network in networks]
    return _table(heads, [cells(count) for count in DEVICES])


def unequal_devices() -> str:
    """Return the table of fleets with devices of different speeds."""
    return _table(
        ["devices", "speed of shares by speed, relative to equal shares"],
        [[name, f"{gain_of_shares(fleet):.2f}"] for name, fleet in FLEETS.items()],
    )


def stragglers() -> str:
    """Return the table of the mean time of the slowest device."""
    heads = [
        f"variation {variation:.0%}: {way}" for variation in VARIATIONS for way in ("every step", "hosts, every 50")
    ]

    def cells(devices: int) -> list[str]:
        values = [
            value
            for variation in VARIATIONS
            for value in (straggling(devices, variation), straggling_of_groups(devices, 8, 50, variation))
        ]
        return [f"{devices:,}", *(f"{value:.3f}" for value in values)]

    return _table(["devices", *heads], [cells(count) for count in DEVICES])


def tables(networks: Sequence[Network]) -> dict[str, str]:
    """Return the tables by name."""
    spares = ", ".join(f"{spare_share(source):.2%}" for source in HOURS_OF_A_DEVICE)
    named: dict[str, Callable[[], str]] = {
        "buckets": lambda: buckets(networks[0]),
        "speeds-resnet50": lambda: speeds(networks[0]),
        "speeds-vit": lambda: speeds(networks[1]),
        "bytes": lambda: bytes_and_memory(networks),
        "failures": lambda: interruptions(networks),
        "spares": lambda: f"Hosts in repair, by Llama 3 and by RSC-1: {spares}.\n",
        "unequal": unequal_devices,
        "stragglers": stragglers,
    }
    return {name: make() for name, make in named.items()}


def filled(page: str, made: dict[str, str]) -> str:
    """Return the text of a page with its tables, which stand between `<!-- table NAME -->` and `<!-- end -->`."""
    return _TABLE.sub(lambda found: f"{found[1]}{made[found[2]]}{found[3]}", page)


def write_page(page: Path, made: dict[str, str]) -> None:
    page.write_text(filled(page.read_text(), made))


def _megabytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:,.1f}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
