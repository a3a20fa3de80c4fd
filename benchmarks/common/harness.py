"""Shared by the benchmarks: contenders alternate, and are compared by medians and by the ratio in one run."""

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

CHILD_SECONDS = 1200

Figures = dict[str, Any]
State = TypeVar("State")


def alternate(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn. The order changes in every round, so that a drift of the machine favors no contender."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            seconds[name].append(contenders[name]())
    return seconds


def compare(seconds: Mapping[str, list[float]], images: int, target: float | None = None) -> Figures:
    """Medians over the rounds, and the first contender's speed as a multiple of the last's, which may have a target.

    Other programs only make a turn slower, so on a busy machine the ratio of the best turns varies least.
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
    """Raises where contenders disagree: speeds compare only if they compute the same."""
    first, *others = found.values()
    for other in others:
        np.testing.assert_allclose(other, first, rtol=tolerance, err_msg=str(found))


def random_images(count: int, size: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """uint8[count, size, size, 3] and labels int64[count]; the same at each call."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, size, size, 3), np.uint8), rng.integers(0, classes, count)


def copy(state: State) -> State:
    """A step consumes the state that it is given."""
    return jax.block_until_ready(jax.tree.map(jnp.copy, state))


def take_steps(step: Callable[[State, Any], tuple[State, Any]], state: State, batches: Iterable[Any]) -> State:
    """The state after one step a batch; consumes the state that it is given."""
    for batch in batches:
        state, _ = step(state, batch)
    return jax.block_until_ready(state)


def time_steps(step: Callable[[State, Any], tuple[State, Any]], state: State, batches: Iterable[Any]) -> float:
    """Seconds of one step a batch, from a copy of the state."""
    state = copy(state)
    begin = time.perf_counter()
    take_steps(step, state, batches)
    return time.perf_counter() - begin


def in_processes(count: int, script: list[str]) -> Figures:
    """Run a script as a job of CPU processes, each on its own core; returns the last line of the first, JSON."""
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
    """Images per second of every contender, and below them the ratio with the range over its rounds."""
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
