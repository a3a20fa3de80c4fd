"""The figure of the projection: efficiency by devices and way, and the time that failures cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.large.failures import HOURS_OF_A_DEVICE, failures
from benchmarks.large.networks import Network
from benchmarks.large.tables import LARGEST_BATCH, MOST_IMAGES, images_of
from benchmarks.large.ways import steps

HOSTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 12_500)
SETTINGS: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "large jobs", "font.size": 8}


def draw(networks: Sequence[Network], path: Path) -> None:
    """Write the figure as SVG, without a date."""
    with plt.rc_context(SETTINGS):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
        _efficiency(left, networks[0], None, f"{MOST_IMAGES} images a device")
        _efficiency(middle, networks[0], LARGEST_BATCH, f"global batch of at most {LARGEST_BATCH:,}")
        left.legend(loc="lower left", frameon=False)
        _lost(right, networks)
        figure.suptitle("A projection: nothing above 16 devices was run")
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def _efficiency(axes: Axes, network: Network, batch: int | None, title: str) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for devices in (8 * count for count in HOSTS):
        images = images_of(devices, batch)
        for step in steps(network, devices, images) if images else []:
            lines.setdefault(step.way, []).append((devices, step.efficiency))
    for way, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=way)
    axes.set(xscale="log", xlabel="devices", ylabel="efficiency", ylim=(0, 1.02), title=f"{network.title}, {title}")


def _lost(axes: Axes, networks: Sequence[Network]) -> None:
    for network in networks:
        for source in HOURS_OF_A_DEVICE:
            points = [(8 * count, failures(8 * count, network.state_bytes, source).lost) for count in HOSTS]
            axes.plot(*zip(*points, strict=True), label=f"{network.title}, failures as in {source}")
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="fraction of the time", title="Time lost to failures")
    axes.set_ylim(top=1)
    axes.legend(loc="upper left", frameon=False)
