"""Compares the accuracy of two recipes over time. Both run at once, on one core each. Seeds swap the cores.

    python benchmarks/whole_runs/recipes.py cifar10 cifar10_rich --data DIR --durations "3 epochs" "5 epochs" \
        --seeds 0 1 2 --out FILE.json -- --model.width 16

Each run is a process of `jaxddp train` with the options after `--`. Give durations that take equally long. The time of
a validation is that of all earlier steps (from their images per second) and validations. The time of the whole process,
with imports and compilation, is reported separately.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import CHILD_SECONDS, Figures, machine, parse_with_overrides
from jaxddp.training.listeners.jsonl import parse, series


def start(
    recipe: str, duration: str, seed: int, core: int, workdir: Path, options: argparse.Namespace
) -> subprocess.Popen:
    """Start a run, pinned to a core."""
    words = ["train", recipe, "--data.path", options.data, "--seed", str(seed), "--train.duration", duration]
    words += ["--workdir", str(workdir), "--log.to", "jsonl", "--checkpoint.every", "100%", *options.overrides]
    all_cores = os.sched_getaffinity(0)
    # A child inherits the core. Set the core before the child imports JAX, which counts cores.
    os.sched_setaffinity(0, {core})
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxddp", *words],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
    finally:
        os.sched_setaffinity(0, all_cores)


def read_validations(workdir: Path) -> list[Figures]:
    """Read the validations, of averaged parameters if there are any, with the seconds until their end."""
    rows = [row for _, row in parse(workdir / "metrics.jsonl")]
    results = series(rows)
    between = np.diff(results.train["step"], prepend=0)
    batch_size = json.loads((workdir / "config.json").read_text())["train"]["batch_size"]
    ends = np.cumsum(between * batch_size / results.train["images_per_second"])
    validations, seconds = [row for row in rows if row["split"].startswith("val")], 0.0
    last = {row["step"]: row for row in validations}
    points = []
    for step in last:
        seconds += sum(row["seconds"] for row in validations if row["step"] == step)
        training = float(np.interp(step, results.train["step"], ends))
        points.append({"step": step, "seconds": training + seconds, "top1": last[step]["top1"]})
    return points


def run_side_by_side(seed: int, swapped: bool, options: argparse.Namespace, folder: Path) -> dict[str, Figures]:
    """Run both recipes with one seed. Returns the validations of each, and its seconds from start to end."""
    cores, runs = sorted(os.sched_getaffinity(0))[:2], {}
    begin = time.perf_counter()
    for place, (recipe, duration) in enumerate(zip(options.recipes, options.durations, strict=True)):
        core = cores[(place + swapped) % len(cores)]
        runs[recipe] = start(recipe, duration, seed, core, folder / f"{recipe}-{seed}", options)
    seconds: dict[str, float] = {}
    while len(seconds) < len(runs):
        if time.perf_counter() - begin > CHILD_SECONDS:
            for run in runs.values():
                run.kill()
            sys.exit(f"seed {seed}: not finished after {CHILD_SECONDS} s")
        for recipe, run in runs.items():
            if recipe not in seconds and run.poll() is not None:
                seconds[recipe] = time.perf_counter() - begin
                if run.returncode:
                    sys.exit(f"{recipe}, seed {seed}: exit code {run.returncode}")
        time.sleep(0.2)
    return {
        recipe: {"process_seconds": seconds[recipe], "validations": read_validations(folder / f"{recipe}-{seed}")}
        for recipe in runs
    }


def table(results: dict[int, dict[str, Figures]]) -> str:
    """Format the accuracy of each validation with its time, and the medians of the last ones."""
    lines = [f"{'seed':<6}{'recipe':<24}{'process':>9}   top-1 at seconds"]
    last: dict[str, list[float]] = {}
    for seed, of_seed in results.items():
        for recipe, figures in of_seed.items():
            points = ", ".join(f"{100 * p['top1']:.2f}% at {p['seconds']:.0f}" for p in figures["validations"])
            lines.append(f"{seed:<6}{recipe:<24}{figures['process_seconds']:>7.0f} s   {points}")
            last.setdefault(recipe, []).append(figures["validations"][-1]["top1"])
    lines += [f"{recipe}: median {100 * statistics.median(values):.2f}%" for recipe, values in last.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs=2)
    parser.add_argument("--data", required=True)
    parser.add_argument("--durations", nargs=2, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    options = parse_with_overrides(parser)
    results: dict[int, dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for place, seed in enumerate(options.seeds):
            results[seed] = run_side_by_side(seed, bool(place % 2), options, Path(folder))
            # Written after each seed, because a long benchmark may be cut off.
            report = {"recipes": options.recipes, "durations": options.durations, "options": options.overrides}
            options.out.write_text(json.dumps({**report, **machine(), "found": results}, indent=2) + "\n")
            print(table(results), flush=True)


if __name__ == "__main__":
    main()
