"""Times contenders in alternation, and compares their medians and the ratio within each round."""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

CHILD_SECONDS = 1200

Figures = dict[str, Any]
State = TypeVar("State")


def alternate(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each turn. The order alternates between rounds, so that drift favors no contender."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            seconds[name].append(contenders[name]())
    return seconds


def compare(seconds: Mapping[str, list[float]], images: int, target: float | None = None) -> Figures:
    """Return medians over the rounds, and the speed of the first contender as a multiple of the second's.

    Other programs can only slow a turn down, so on a busy machine the ratio of the fastest turns varies least.

    Args:
        target: A target for the ratio.
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


def check_losses(results: Mapping[str, list[float]], tolerance: float) -> None:
    """Raise AssertionError if the losses of contenders differ: a comparison of speeds needs equal computations."""
    first, *others = results.values()
    for other in others:
        np.testing.assert_allclose(other, first, rtol=tolerance, err_msg=str(results))


def random_images(count: int, size: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8[count, size, size, 3], and labels, int64[count]; the same at each call."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, size, size, 3), np.uint8), rng.integers(0, classes, count)


def copy(state: State) -> State:
    """Copy a state, because a step donates its argument."""
    return jax.block_until_ready(jax.tree.map(jnp.copy, state))


def take_steps(step: Callable[[State, Any], tuple[State, Any]], state: State, batches: Iterable[Any]) -> State:
    """Take one step for each batch, and return the state. Donates the given state."""
    for batch in batches:
        state, _ = step(state, batch)
    return jax.block_until_ready(state)


def time_steps(step: Callable[[State, Any], tuple[State, Any]], state: State, batches: Iterable[Any]) -> float:
    """Take one step for each batch, starting from a copy of the state, and return the total seconds."""
    state = copy(state)
    begin = time.perf_counter()
    take_steps(step, state, batches)
    return time.perf_counter() - begin


def run_in_processes(count: int, script: list[str]) -> Figures:
    """Run a script as a job of CPU processes with a core each. Returns the last line of process 0, parsed as JSON."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    all_cores = os.sched_getaffinity(0)
    cores, children = sorted(all_cores), []
    for process in range(count):
        job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(process)}
        command = [sys.executable, *script]
        environ = {**os.environ, **job, "JAX_PLATFORMS": "cpu"}
        # A child inherits the core. Set the core before the child imports JAX, which counts cores.
        os.sched_setaffinity(0, {cores[process % len(cores)]})
        children.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    os.sched_setaffinity(0, all_cores)
    return result_of(children)


def run_jaxddp(*words: object, seconds: float = CHILD_SECONDS) -> str:
    """Run a command of jaxddp on the CPU, and return its output. Raises: an error of subprocess if it fails."""
    command = [sys.executable, "-m", "jaxddp", *map(str, words)]
    environ: dict[str, str] = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, check=True, timeout=seconds, env=environ, stdout=subprocess.PIPE, text=True).stdout


def result_of(children: Sequence[subprocess.Popen[str]]) -> Figures:
    """Wait for the processes of a job. Return the last line that the first one printed, parsed as JSON.

    If a process fails or does not end, all are killed, and this script ends.
    """
    try:
        outputs = [child.communicate(timeout=CHILD_SECONDS)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        sys.exit(f"the processes ended with exit codes {[child.returncode for child in children]}")
    return json.loads(outputs[0].splitlines()[-1])


def parse_with_overrides(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line. The words after "--" become `overrides`."""
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:split])
    options.overrides = words[split + 1 :]
    return options


def machine() -> Figures:
    return {"jax": jax.__version__, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}


def table(comparisons: Mapping[str, Figures]) -> str:
    """Format the speeds of all contenders, and the ratio of the two contenders' speeds with its range over rounds."""
    width = max(map(len, ["comparison", *comparisons])) + 2
    lines = [f"{'comparison':<{width}}{'contender':<18}{'images/s':>10}"]
    for comparison, results in comparisons.items():
        for name, speed in results["images_per_second"].items():
            lines.append(f"{comparison:<{width}}{name:<18}{speed:>10.1f}")
        low, high = min(results["ratio_of_each_round"]), max(results["ratio_of_each_round"])
        spread = f"best turns {results['ratio_of_best_turns']:.3f}, rounds {low:.3f} to {high:.3f}"
        target = f"; target {results['target']}" if results["target"] else ""
        lines.append(f"{comparison:<{width}}{'ratio':<18}{results['ratio']:>10.3f}   ({spread}{target})")
    return "\n".join(lines)
