"""Compares a recipe with airbench's own script on the same pixels: the accuracy of each epoch and at the end, and time.

    python benchmarks/whole_runs/airbench.py airbench94_muon.py --data FILE.npz --torch PYTHON --seeds 0 1 2 \
        --out FILE.json [--recipe cifar10_fast] [-- OPTION …]

FILE.npz has the arrays that `benchmarks/rivals/gpu_data.py unpack` writes, and PYTHON is an interpreter with torch and
torchvision. For each seed, the script and then `jaxddp train RECIPE` run alone, each on all cores in float32; the next
seed begins with jaxddp. The options after `--` change the recipe. The epochs are validated with one view of each image,
and the last state also with the views of the recipe (for airbench: six). The seconds are those of training alone.
Without --torch, only jaxddp runs. The same command continues an interrupted benchmark: it keeps the results in
FILE.json and the runs of jaxddp in FILE.runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, machine, parse_with_overrides
from jaxddp.config import load
from jaxddp.training.listeners.jsonl import parse, series

CONTENDER = Path(__file__).parents[1] / "rivals" / "contenders" / "torch_airbench.py"
OURS, SOURCE = "jaxddp", "airbench"
CHILD_SECONDS = 3 * 3600


def run_source(seed: int, options: argparse.Namespace) -> Figures:
    """Run airbench's script with a seed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.jsonl"
        words = [options.script, "--data", options.data, "--folder", folder, "--out", out, "--keys", seed, "--on-cpu"]
        call([options.torch, CONTENDER, *words])
        result = json.loads(out.read_text().splitlines()[-1])
        return {"epochs": result["epochs"], "top1": result["top1"]}


def run_ours(seed: int, options: argparse.Namespace) -> Figures:
    """Train the recipe with a seed, and evaluate its last state with its own views."""
    cores, run = len(os.sched_getaffinity(0)), options.out.with_suffix(".runs") / str(seed)
    words = ["--data.path", options.data, "--seed", seed, "--workdir", run, "--log.to", "jsonl", *options.overrides]
    words += ["--parallel.cpu-devices", cores, "--model.batch-norm", "sync", "--parallel.stall-timeout", CHILD_SECONDS]
    words += ["--eval.views", "one", "--eval.every", "1 epoch", "--checkpoint.every", "1 epoch"]
    jaxddp = (sys.executable, "-m", "jaxddp")
    call([*jaxddp, "train", options.recipe, *words])
    final = call([*jaxddp, "eval", run, "--eval.views", load(options.recipe).eval.views])
    results = series([row for _, row in parse(run / "metrics.jsonl")])
    # The part of an epoch at the end is validated, too.
    whole, seconds = results.epochs["top1"], results.epochs["seconds"].cumsum()
    rows = zip(whole, results.val["top1"][: len(whole)], seconds, strict=True)
    return {
        "epochs": [{"train": float(row[0]), "val": float(row[1]), "seconds": float(row[2])} for row in rows],
        "top1": float(dict(line.split(": ") for line in final.splitlines() if ": " in line)["top1"]),
    }


def call(words: Sequence[object]) -> str:
    """Run a program, and return its output, which is shown too."""
    command = [str(word) for word in words]
    done = subprocess.run(command, check=True, timeout=CHILD_SECONDS, env=on_cpu(), stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    return done.stdout


def on_cpu() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu"}


def table(results: dict[str, dict[str, Figures]]) -> str:
    """Format the accuracies of each run, and the medians of each contender."""
    lines = [f"{'seed':<6}{'contender':<12}{'training':>9}   one view after each epoch; the last state with all views"]
    last: dict[str, list[float]] = {}
    for seed, of_seed in results.items():
        for name, figures in sorted(of_seed.items()):
            epochs = " ".join(f"{100 * epoch['val']:.2f}" for epoch in figures["epochs"])
            seconds = figures["epochs"][-1]["seconds"]
            lines.append(f"{seed:<6}{name:<12}{seconds:>7.0f} s   {epochs}; {100 * figures['top1']:.2f}%")
            last.setdefault(name, []).append(figures["top1"])
    lines += [f"{name}: median {100 * statistics.median(values):.2f}%" for name, values in last.items()]
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--torch", help="an interpreter with torch and torchvision")
    parser.add_argument("--recipe", default="cifar10_fast")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    return parse_with_overrides(parser)


def main() -> None:
    options = parse_options()
    settings = {"recipe": options.recipe, "options": options.overrides, **machine()}
    results: dict[str, dict[str, Figures]] = {}
    if options.out.exists():
        before = json.loads(options.out.read_text())
        if other := [name for name in ("recipe", "options") if before[name] != settings[name]]:
            sys.exit(f"{options.out}: was written with {other[0]} {before[other[0]]}; give another --out")
        results = before["found"]
    contenders = {SOURCE: run_source, OURS: run_ours} if options.torch else {OURS: run_ours}
    for place, seed in enumerate(options.seeds):
        found = results.setdefault(str(seed), {})
        for name in list(contenders)[:: -1 if place % 2 else 1]:
            if name in found:
                continue
            found[name] = contenders[name](seed, options)
            # Written after each run, because a long benchmark may be cut off.
            options.out.write_text(json.dumps({**settings, "found": results}, indent=2) + "\n")
            print(table(results), flush=True)


if __name__ == "__main__":
    main()
