"""What the benchmarks share: contenders take turns, and are told apart by medians and by the ratio in one run."""

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

CHILD_SECONDS = 1200

Figures = dict[str, Any]


def alternate(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn; who begins changes from round to round, so that a drift of the machine's favours nobody."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            seconds[name].append(contenders[name]())
    return seconds


def compare(seconds: Mapping[str, list[float]], images: int, target: float | None = None) -> Figures:
    """Medians over the rounds, and the first contender's speed as a multiple of the last's, which may have a target.

    Other programs only ever make a turn slower, so on a busy machine the ratio of the best turns is the steadier one.
    """
    ours, other = seconds.values()
    return {
        "images_per_second": {name: images / statistics.median(turns) for name, turns in seconds.items()},
        "ratio": statistics.median(other) / statistics.median(ours),
        "ratio_of_best_turns": min(other) / min(ours),
        "ratio_of_each_round": [b / a for a, b in zip(ours, other, strict=True)],
        "seconds": dict(seconds),
        "target": target,
    }


def check_losses(found: Mapping[str, list[float]], tolerance: float) -> None:
    """Raises where contenders disagree: the faster of two that compute different things has won nothing."""
    first, *others = found.values()
    for other in others:
        np.testing.assert_allclose(other, first, rtol=tolerance, err_msg=str(found))


def in_processes(count: int, script: list[str]) -> Figures:
    """Run a script as a job of CPU processes, each on its own core; returns what the first prints last, as JSON."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    everything = os.sched_getaffinity(0)
    cores, children = sorted(everything), []
    for process in range(count):
        job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(process)}
        command = [sys.executable, *script]
        environ = {**os.environ, **job, "JAX_PLATFORMS": "cpu"}
        # A child inherits the core; it must have it before JAX, which counts cores, is imported there.
        os.sched_setaffinity(0, {cores[process % len(cores)]})
        children.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    os.sched_setaffinity(0, everything)
    try:
        outputs = [child.communicate(timeout=CHILD_SECONDS)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        sys.exit(f"the processes ended with {[child.returncode for child in children]}")
    return json.loads(outputs[0].splitlines()[-1])


def machine() -> Figures:
    return {"jax": jax.__version__, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}


def table(comparisons: Mapping[str, Figures]) -> str:
    """Every contender's images a second, and under them the ratio with the spread of its rounds."""
    width = max(map(len, ["comparison", *comparisons])) + 2
    lines = [f"{'comparison':<{width}}{'contender':<18}{'images/s':>10}"]
    for comparison, found in comparisons.items():
        for name, speed in found["images_per_second"].items():
            lines.append(f"{comparison:<{width}}{name:<18}{speed:>10.1f}")
        low, high = min(found["ratio_of_each_round"]), max(found["ratio_of_each_round"])
        spread = f"best turns {found['ratio_of_best_turns']:.3f}, rounds {low:.3f} to {high:.3f}"
        target = f"; target {found['target']}" if found["target"] else ""
        lines.append(f"{comparison:<{width}}{'ratio':<18}{found['ratio']:>10.3f}   ({spread}{target})")
    return "\n".join(lines)
