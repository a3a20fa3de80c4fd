"""Times the start of a run, from the command to the first step, without and with cached programs.

    jaxddp data sample digits --out data/digits && python benchmarks/start.py data/digits
    python benchmarks/start.py data/digits --rounds 5 --sets digits

Every start is a separate process. There are three runs on one simulated CPU device:

- digits: handwritten digits from JPEG files, as `make demo` trains them;
- arrays: a ResNet-18 of width 16 on IDX files of 28 pixels, which need no TensorFlow;
- resnet50: a ResNet-50 at 224 pixels, batch 2, on arrays.

Cold starts have an empty cache of compiled programs, warm ones the cache of an earlier start; they alternate. The
target for a warm start is half the time of a cold one. All first losses must be equal, and a warm start must compile
nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common.harness import CHILD_SECONDS, Figures, alternate, machine

TARGET = 0.5
PARTS = ("interpreter", "imports", "TensorFlow", "data set", "trace", "compile or load", "the rest")
SMALL = ["--log.every", "1 step", "--parallel.cpu-devices", "1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("digits", type=Path, help="output folder of `jaxddp data sample digits`")
    parser.add_argument("--rounds", type=int, default=3, help="number of cold and of warm starts")
    parser.add_argument("--sets", nargs="+", choices=RUNS, default=[*RUNS])
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/start.json"))
    options = parser.parse_args()
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "starts": {}}
    for name in options.sets:
        with tempfile.TemporaryDirectory() as folder:
            words = RUNS[name](Path(folder), options.digits)
            report["starts"][name] = compare_starts(Path(folder), words, options.rounds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"results: {options.out}\n\n{table(report['starts'])}")


# --- Runs: each function writes its data if they are missing, and returns a config with overrides ---


def digits(folder: Path, data: Path) -> list[str]:
    return ["digits", "--data.path", str(data)]


def arrays(folder: Path, data: Path) -> list[str]:
    rng = np.random.default_rng(0)
    for split, count in (("train", 512), ("t10k", 64)):
        write_idx(folder / f"{split}-images-idx3-ubyte", rng.integers(0, 256, (count, 28, 28), np.uint8))
        write_idx(folder / f"{split}-labels-idx1-ubyte", (np.arange(count) % 10).astype(np.uint8))
    return ["fashion_mnist", "--data.path", str(folder), "--model.width", "16", "--train.batch-size", "32"]


def resnet50(folder: Path, data: Path) -> list[str]:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (8, 224, 224, 3), np.uint8), np.arange(8) % 2
    np.savez(folder / "set.npz", train_images=images, train_labels=labels, val_images=images, val_labels=labels)
    size = ["--train.batch-size", "2", "--eval.batch-size", "2", "--data.crop", "whole"]
    return ["imagenet_resnet50", "--data.path", str(folder / "set.npz"), *size]


RUNS: dict[str, Callable[[Path, Path], list[str]]] = {"digits": digits, "arrays": arrays, "resnet50": resnet50}


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write bytes in the IDX format of MNIST: type and rank, the sizes, the values."""
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes())


# --- Starts ---


def compare_starts(folder: Path, words: list[str], rounds: int) -> Figures:
    """Return the median seconds of cold and warm starts and of their parts, and the ratio of warm to cold."""
    results: dict[str, list[Figures]] = {"cold": [], "warm": []}

    def turn(kind: str) -> float:
        with tempfile.TemporaryDirectory(dir=folder) as empty:
            results[kind].append(start(Path(empty) if kind == "cold" else folder / "kept", folder, words))
        return results[kind][-1]["total"]

    start(folder / "kept", folder, words)
    totals = alternate({kind: lambda kind=kind: turn(kind) for kind in results}, rounds)
    check(results)
    cold, warm = (statistics.median(totals[kind]) for kind in ("cold", "warm"))
    return {
        "parts": {kind: {part: median(starts, part) for part in PARTS} for kind, starts in results.items()},
        "total": {"cold": cold, "warm": warm},
        "cpu": {kind: statistics.median(one["cpu"] for one in starts) for kind, starts in results.items()},
        "ratio": warm / cold,
        "ratio_of_best_turns": min(totals["warm"]) / min(totals["cold"]),
        "seconds": totals,
        "programs": results["cold"][0]["compiled"],
        "target": TARGET,
    }


def start(kept: Path, folder: Path, words: list[str]) -> Figures:
    """Train to the first step in a process, with its program cache in a folder. Returns `start_parts.py`'s figures."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    script, begin = Path(__file__).parent / "whole_runs" / "start_parts.py", time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as workdir:
        done = subprocess.run(
            [sys.executable, str(script), str(begin), words[0], workdir, *words[1:], *SMALL],
            env=environ | {"JAXDDP_CACHE": str(kept)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=CHILD_SECONDS,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def check(results: dict[str, list[Figures]]) -> None:
    """Raise AssertionError if a cold start loaded programs, a warm start compiled, or losses differ."""
    starts = [one for several in results.values() for one in several]
    assert {one["loss"] for one in starts} == {starts[0]["loss"]}, [one["loss"] for one in starts]
    assert all(one["loaded"] == 0 and one["compiled"] > 0 for one in results["cold"]), results["cold"]
    assert all(one["compiled"] == 0 and one["loaded"] > 0 for one in results["warm"]), results["warm"]


def median(starts: list[Figures], part: str) -> float:
    return statistics.median(one["seconds"].get(part, 0.0) for one in starts)


def table(starts: dict[str, Figures]) -> str:
    lines = []
    for name, results in starts.items():
        lines.append(f"{name:<18}{'cold':>8}{'warm':>8}   seconds")
        rows = {part: [results["parts"][kind][part] for kind in ("cold", "warm")] for part in PARTS}
        rows |= {"total": [*results["total"].values()], "CPU": [*results["cpu"].values()]}
        lines += [f"  {part:<16}{cold:>8.2f}{warm:>8.2f}" for part, (cold, warm) in rows.items()]
        best = results["ratio_of_best_turns"]
        lines.append(
            f"  {'ratio':<16}{results['ratio']:>16.3f}   (best turns {best:.3f}; target {results['target']})\n"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
