"""Draws the validation top-1 of several runs by epoch, in a panel for each data set.

    python benchmarks/whole_runs/accuracy_picture.py --out docs/accuracy.png \
        --panel "CIFAR-10" "ResNet-18=runs/cifar10_0" "fast=fast.json" \
        --panel "Fashion-MNIST" "batch 256=runs/fashion_0"

A path is the work directory of a run, or a JSON file of `airbench.py`, which has several runs. Runs with the same label
have the same color.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxddp.training.listeners.jsonl import parse, series

Points = tuple[Sequence[float], Sequence[float]]
"""Epochs, and the top-1 after each of them."""


def curves(label: str, path: Path) -> Iterator[tuple[str, Points]]:
    """Yield the label and the points of each run."""
    if path.is_dir():
        val = series([row for _, row in parse(path / "metrics.jsonl")]).val
        yield label, (val["epoch"].tolist(), val["top1"].tolist())
        return
    for of_seed in json.loads(path.read_text())["found"].values():
        for contender, figures in of_seed.items():
            top1 = [epoch["val"] for epoch in figures["epochs"]]
            yield f"{label} ({contender})", (range(1, len(top1) + 1), top1)


def draw(axes: Axes, title: str, words: Sequence[str]) -> None:
    colors: dict[str, str] = {}
    for word in words:
        label, _, path = word.rpartition("=")
        for name, (epochs, top1) in curves(label, Path(path)):
            is_new = name not in colors
            colors.setdefault(name, f"C{len(colors)}")
            axes.plot(epochs, top1, color=colors[name], label=name if is_new else None, linewidth=1.6)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("epoch")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--panel", nargs="+", action="append", required=True, metavar=("TITLE", "LABEL=PATH"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    picture = Figure(figsize=(4.4 * len(options.panel), 3.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(picture)
    for axes, (title, *words) in zip(
        picture.subplots(1, len(options.panel), squeeze=False)[0], options.panel, strict=True
    ):
        draw(axes, title, words)
    picture.axes[0].set_ylabel("top-1 on the validation set")
    picture.savefig(options.out, dpi=110)
    print(options.out)


if __name__ == "__main__":
    main()
