"""Runs an unchanged script of airbench (github.com/KellerJordan/cifar10-airbench) until it has printed enough runs.

`benchmarks/gpu.py` starts it:

    python torch_airbench.py SCRIPT --data FILE.npz --folder DIR --out FILE --keys 0 1 2 [--on-cpu]

The script reads `cifar10/train.pt` and `test.pt` from its working directory, and prints a table. The line of a run's
last evaluation has its accuracy and the seconds by the script's clock: preparation, training and test-time
augmentation, without compilation and without the evaluation after each epoch. Its first run, "warmup", is ignored.

With --on-cpu, a copy of the script runs on the CPU in float32, without compilation and without the first run. The keys
are the seeds of the runs. Nothing else of the script changes. Muon's iterations stay in bfloat16.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.rivals.contenders.outcome import add_result, attempt

FILES = {"train": "train.pt", "val": "test.pt"}
CLOCK = """
import time
class CpuClock:
    def record(self): self.seconds = time.perf_counter()
    def elapsed_time(self, end): return 1000 * (end.seconds - self.seconds)
"""
TRANSFORMS = """
import torch
class Normalize(torch.nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.mean, self.std = (torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std))
    def forward(self, images):
        return (images - self.mean.to(images)) / self.std.to(images)
"""
"""All that the scripts use of torchvision, for a machine without it."""
CHANGES_FOR_CPU = {
    r'torch\.device\("cuda"\)|torch\.device\(gpu\)': 'torch.device("cpu")',
    r"\.cuda\(\)": "",
    r"\.half\(\)": ".float()",
    r"@torch\.compile\n": "",
    r'    model\.compile\(mode="max-autotune"\)\n': "",
    r"""    main\(["']warmup["'].*\)\n""": "",
    r"torch\.cuda\.synchronize\(\)": "pass",
    r"torch\.cuda\.Event\(enable_timing=True\)": "CpuClock()",
    r"def main\((.*)\):\n": r"def main(\1):\n    torch.manual_seed(run)\n",
}
"""Patterns in the scripts of airbench, and their replacements."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("script", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="an .npz file of arrays, as for data.path")
    parser.add_argument("--folder", type=Path, required=True, help="working directory of the script")
    parser.add_argument("--keys", nargs="+", required=True, help="keys of the runs, in order")
    parser.add_argument("--on-cpu", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    write_pixels(options.data, options.folder / "cifar10")
    script = options.script.absolute()
    if options.on_cpu:
        script = options.folder.absolute() / "on_cpu.py"
        script.write_text(for_cpu(options.script.read_text(), options.keys))
    stand_in = options.folder.absolute() / "without"
    if find_spec("torchvision") is None:
        (stand_in / "torchvision").mkdir(parents=True, exist_ok=True)
        (stand_in / "torchvision/__init__.py").touch()
        (stand_in / "torchvision/transforms.py").write_text(TRANSFORMS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(stand_in)])}
    command = [sys.executable, "-u", str(script)]
    missing, lines = list(options.keys), Lines()
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=options.folder, env=environment, **pipes) as process:
        assert process.stdout is not None
        for figures in runs(lines.echo(process.stdout)):
            add_result(options.out, figures, missing.pop(0))
            if not missing:
                # Otherwise it would continue to 200 runs.
                process.kill()
                return
    if lines.last.startswith(("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")):
        raise torch.OutOfMemoryError(lines.last)
    raise RuntimeError(f"{options.script.name} ended {len(missing)} runs early: {lines.last}")


def for_cpu(text: str, seeds: Sequence[str]) -> str:
    """Return the text of a script that trains on the CPU, once with each seed."""
    for pattern, new in {**CHANGES_FOR_CPU, r"range\((200|25)\)\]": f"[{', '.join(seeds)}]]"}.items():
        text = re.sub(pattern, new, text)
    if "cuda" in text.replace("nvidia", "").replace("torch.backends.cudnn", ""):
        print("a part of the script still names cuda")
    return CLOCK + text


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
    """Yield the result of each run in the script's table when it is printed. Headings identify the columns.

    The accuracies of an epoch are those of its last training batch, and of the test images with one view. Its seconds
    are those of all epochs so far, without these tests.
    """
    names: list[str] = []
    run = ""
    epochs: list[dict[str, float]] = []
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            continue
        names = names or cells
        row = dict(zip(names, cells, strict=False))
        if cells == names:
            continue
        run = row["run"] or run
        seconds = float(next(value for name, value in row.items() if name.endswith("time_seconds")))
        if row["epoch"] != "eval":
            epochs.append({"train": float(row["train_acc"]), "val": float(row["val_acc"]), "seconds": seconds})
        elif run == "warmup":
            epochs = []
        else:
            yield {"seconds": seconds, "top1": float(row["tta_val_acc"]), "epochs": epochs}
            epochs = []


def write_pixels(data: Path, folder: Path) -> None:
    """Write the arrays to the files that airbench's loader reads, in a random order.

    The first 5,000 images initialize the first convolution. In a file that is sorted by class, they are of one class.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    with np.load(data) as arrays:
        for split, name in FILES.items():
            order = rng.permutation(len(arrays[f"{split}_labels"]))
            values = {kind: torch.from_numpy(arrays[f"{split}_{kind}"][order]) for kind in ("images", "labels")}
            values["labels"] = values["labels"].long()
            classes = [str(label) for label in range(int(values["labels"].max()) + 1)]
            torch.save(values | {"classes": classes}, folder / "unfinished.pt")
            os.replace(folder / "unfinished.pt", folder / name)


if __name__ == "__main__":
    attempt(main, parse())
