"""Runs an unchanged script of airbench (github.com/KellerJordan/cifar10-airbench) until it has printed enough runs.

`benchmarks/gpu.py` starts it:

    python torch_airbench.py SCRIPT --data FILE.npz --folder DIR --out FILE --keys 0 1 2

The script reads `cifar10/train.pt` and `test.pt` from its working directory, and prints a table. The line of a run's
last evaluation has its accuracy and the seconds by the script's clock: preparation, training and test-time
augmentation, without compilation and without the evaluation after each epoch. Its first run, "warmup", is ignored.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.rivals.contenders.outcome import add_result, attempt

FILES = {"train": "train.pt", "val": "test.pt"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("script", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="an .npz file of arrays, as for data.path")
    parser.add_argument("--folder", type=Path, required=True, help="working directory of the script")
    parser.add_argument("--keys", nargs="+", required=True, help="keys of the runs, in order")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    write_pixels(options.data, options.folder / "cifar10")
    command = [sys.executable, "-u", str(options.script.absolute())]
    missing, lines = list(options.keys), Lines()
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=options.folder, **pipes) as script:
        assert script.stdout is not None
        for figures in runs(lines.echo(script.stdout)):
            add_result(options.out, figures, missing.pop(0))
            if not missing:
                # Otherwise it would continue to 200 runs.
                script.kill()
                return
    if lines.last.startswith(("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")):
        raise torch.OutOfMemoryError(lines.last)
    raise RuntimeError(f"{options.script.name} ended {len(missing)} runs early: {lines.last}")


class Lines:
    """A printer of lines, which keeps the last non-empty line."""

    def __init__(self) -> None:
        self.last = ""

    def echo(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            print(line, end="", flush=True)
            self.last = line.strip() or self.last
            yield line


def runs(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the result of each run in the script's table when it is printed. Headings identify the columns."""
    names: list[str] = []
    run = ""
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            continue
        names = names or cells
        row = dict(zip(names, cells, strict=False))
        run = row.get("run") or run
        if row.get("epoch") == "eval" and run != "warmup":
            seconds = next(value for name, value in row.items() if name.endswith("time_seconds"))
            yield {"seconds": float(seconds), "top1": float(row["tta_val_acc"])}


def write_pixels(data: Path, folder: Path) -> None:
    """Write the arrays to the files that airbench's loader reads."""
    folder.mkdir(parents=True, exist_ok=True)
    with np.load(data) as arrays:
        for split, name in FILES.items():
            values = {kind: torch.from_numpy(arrays[f"{split}_{kind}"]) for kind in ("images", "labels")}
            values["labels"] = values["labels"].long()
            classes = [str(label) for label in range(int(values["labels"].max()) + 1)]
            torch.save(values | {"classes": classes}, folder / "unfinished.pt")
            os.replace(folder / "unfinished.pt", folder / name)


if __name__ == "__main__":
    attempt(main, parse())
