"""Compares the step with another trainer's, in fresh processes that alternate, after a check of equal losses."""

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.common.harness import CHILD_SECONDS, Figures, alternate, check_losses, compare
from benchmarks.rivals.contenders.case import Case, Task
from benchmarks.rivals.contenders.jax_case import write_weights

OURS = "jaxddp"
CONTENDERS = Path(__file__).with_name("contenders")
# With batch statistics over few pixels, rounding differences grow with every step; these rates are low enough.
CASES = {
    "resnet18-32px-w32": Case("resnet18", "small", 32, 32, 32, classes=10),
    "resnet18-32px-w64": Case("resnet18", "small", 64, 32, 32, classes=10),
    "resnet18-128px": Case("resnet18", "imagenet", 64, 128, 16, learning_rate=0.001),
    "resnet50-128px": Case("resnet50", "imagenet", 64, 128, 16, learning_rate=1e-6),
    **{
        f"{name}-128px": Case(name, "imagenet", 64, 128, 16, learning_rate=1e-6)
        for name in ("resnext50_32x4d", "regnet_y_400mf", "efficientnet_b0", "mobilenet_v3_large")
    },
    "swin_t-112px": Case("swin_t", "imagenet", 96, 112, 8, learning_rate=0.001),
}
TARGETS = {("torch", 2): 0.85, ("flax", 2): 2.0, ("flax", 1): 1.1, ("newest", 2): 1.0, ("newest", 1): 1.0}
"""Targets for the speed as a multiple of the rival's, by rival and number of processes."""
LOSS_TOLERANCE = 2e-4


def compare_rival(rival: str, names: list[str], rounds: int, steps: int, python: str) -> Iterator[tuple[str, Figures]]:
    """Compare every case on two processes of a core each, and for Flax also in one process with two devices.

    Each result is yielded when it is measured, so that a failing case does not lose earlier results.

    Args:
        rival: "torch", "flax", or "newest" for jaxddp itself with the libraries of another interpreter.
        names: Names of `CASES`.
        python: The interpreter of "torch" or "newest".
    """
    for name in names:
        for processes in (2,) if rival == "torch" else (2, 1):
            label = f"{name}, {processes} {'process' if processes == 1 else 'processes'}"
            results = compare_case(rival, CASES[name], processes, rounds, steps, python)
            print(f"{label}: {results['ratio']:.3f}", flush=True)
            yield label, results


def compare_case(rival: str, case: Case, processes: int, rounds: int, steps: int, python: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.npz"
        write_weights(case, weights)
        task = Task(case, weights, steps, 1, Path(folder) / "out.json", 2 if processes == 1 else None)
        starts: dict[str, list[Figures]] = {OURS: [], rival: []}

        def turn(name: str) -> float:
            starts[name].append(start(name, task, processes, python))
            return starts[name][-1]["step"]

        # Contenders in JAX compile here, and later starts load the cached program.
        check_losses(
            {name: start(name, replace(task, steps=1), processes, python)["losses"] for name in starts}, LOSS_TOLERANCE
        )
        seconds = alternate({name: functools.partial(turn, name) for name in starts}, rounds)
    figures = compare(seconds, 2 * case.batch, TARGETS[rival, processes])
    return figures | {"case": str(case), "first_step": {n: [s["first_step"] for s in all] for n, all in starts.items()}}


def start(name: str, task: Task, processes: int, python: str) -> Figures:
    """Start a contender with the launcher, with huge pages and a share of the cores, and return its results."""
    task_file = task.out.with_name(f"{name}.task.json")
    task.write(task_file)
    task.out.unlink(missing_ok=True)
    task.out.with_suffix(".store").unlink(missing_ok=True)
    options = ["--gpus", "0", "--processes", str(processes), "--logs", str(task.out.parent / "logs")]
    program = python if name in ("torch", "newest") else sys.executable
    script = CONTENDERS / f"{OURS if name == 'newest' else name}_step.py"
    command = [program, str(script), str(task_file)]
    launched = [sys.executable, "-m", "jaxddp", "launch", *options, "--", *command]
    done = subprocess.run(launched, capture_output=True, text=True, timeout=CHILD_SECONDS)
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return json.loads(task.out.read_text())
