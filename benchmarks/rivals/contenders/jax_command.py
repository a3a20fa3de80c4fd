"""Trains a recipe in child processes, kills and resumes one, and uses its run. `benchmarks/gpu.py` starts it:

    python jax_command.py digits --data FILE --folder DIR --out FILE --keys resumed float16 reproducible commands

`resumed` and `reproducible` compare what two runs log, and the arrays of their last states, bit for bit. `commands`
lists missing packages, and for each command the last line of its error, or "ok".
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.common.harness import Figures
from benchmarks.rivals.contenders.outcome import add_result, attempt, reason

SETTINGS = ("data.cache=device", "checkpoint.every=20 steps", "eval.every=40 steps", "log.every=10 steps")
TIMES = ("seconds", "images_per_second", "data_wait_fraction", "flops_utilization", "peak_memory", "epoch_seconds")
PACKAGES = ("tensorflow", "clu", "tyro", "rich", "matplotlib", "sklearn", "PIL", "tensorboard", "yaml", "plotly")
COMMANDS = ("train {run}", "eval {run}", "predict {run} {data} --out {run}.csv", "export {run} --out {run}.stablehlo")
COMMANDS += ("doctor",)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True, help="as data.path")
    parser.add_argument("--folder", type=Path, required=True, help="of the runs")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--keys", nargs="*", default=[], choices=KEYS)
    parser.add_argument("--train", metavar="NAME", help="train a run of this name in this process")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    for key in options.keys:
        try:
            add_result(options.out, KEYS[key](options), key)
        except Exception as error:
            add_result(options.out, {"failed": reason(error)}, key)


def train_here(options: argparse.Namespace) -> None:
    """Train a run to its end, and write a digest of its last state beside it."""
    # The process that starts others must not hold the device's memory.
    import jax

    from benchmarks.rivals.contenders.jax_cifar import with_settings
    from jaxddp.recipe.file import read_recipe
    from jaxddp.setup.run_setup import open_recipe
    from jaxddp.setup.run_training import train

    file = with_settings(read_recipe(options.recipe), (*SETTINGS, *options.set), options.data, validates=True)
    state = train(open_recipe(file), options.folder / options.train)
    content = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))
    (options.folder / f"{options.train}.sha256").write_text(hashlib.sha256(content).hexdigest())


def started(options: argparse.Namespace, name: str, *words: str) -> subprocess.Popen[Any]:
    command = [sys.executable, __file__, options.recipe, "--data", options.data, "--folder", str(options.folder)]
    return subprocess.Popen([*command, "--out", str(options.out), "--train", name, "--set", *options.set, *words])


def trained(options: argparse.Namespace, name: str, *words: str) -> tuple[str, list[Figures]]:
    """Train a run in another process. Returns the digest of its last state, and what it logged, without times."""
    if code := started(options, name, *words).wait():
        raise RuntimeError(f"the run {name} ended with exit code {code}")
    lines = (options.folder / name / "metrics.jsonl").read_text().splitlines()
    rows = [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]
    return (options.folder / f"{name}.sha256").read_text(), rows


def resumed(options: argparse.Namespace) -> Figures:
    shutil.rmtree(options.folder, ignore_errors=True)
    process, checkpoints = started(options, "killed"), options.folder / "killed/checkpoints"
    while not (saved := [path.name for path in checkpoints.glob("[0-9]*") if path.name.isdecimal()]):
        if process.poll() is not None:
            raise RuntimeError(f"the run ended before its first checkpoint, with exit code {process.returncode}")
        time.sleep(0.05)
    process.kill()
    process.wait()
    second, whole = trained(options, "killed"), trained(options, "whole")
    return equality(second, whole) | {"killed_at": saved[-1]} | whole[1][-1]


def equality(first: tuple[str, list[Figures]], second: tuple[str, list[Figures]]) -> Figures:
    return {"arrays_equal": first[0] == second[0], "metrics_equal": first[1] == second[1]}


def float16(options: argparse.Namespace) -> Figures:
    _, rows = trained(options, "float16", "train.precision=float16", "train.duration=50 steps")
    return {name: str([row[name] for row in rows if name in row]) for name in ("loss", "loss_scale")}


def reproducible(options: argparse.Namespace) -> Figures:
    return equality(*(trained(options, name, "parallel.reproducible=true") for name in ("first", "second")))


def commands(options: argparse.Namespace) -> Figures:
    figures: Figures = {"missing": ", ".join(name for name in PACKAGES if find_spec(name) is None)}
    for words in COMMANDS:
        command = words.format(run=options.folder / "whole", data=options.data).split()
        done = subprocess.run([sys.executable, "-m", "jaxddp", *command], capture_output=True, text=True, timeout=300)
        error = (done.stderr.strip().splitlines() or ["failed"])[-1][:300]
        figures[command[0]] = error if done.returncode else "ok"
    return figures


KEYS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    each.__name__: each for each in (resumed, float16, reproducible, commands)
}

if __name__ == "__main__":
    given = parse()
    train_here(given) if given.train else attempt(main, given)
