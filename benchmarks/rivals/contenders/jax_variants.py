"""Compares variants of jaxddp's step (`step_variants.py`) with the unchanged step. All alternate in one process.

`benchmarks/gpu.py` starts it with some of the variants, by default all.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.common.harness import alternate
from benchmarks.rivals.contenders.case import Task
from benchmarks.rivals.contenders.outcome import add_result, attempt, reason
from benchmarks.rivals.contenders.step_variants import BASE, VARIANTS, Variant, make_variants
from jaxddp.engine.step_objective import MetricSums
from jaxddp.measure.cost import compile_with_cost

# In bfloat16 a different order of additions shows in the third digit.
LOSS_TOLERANCE = 0.02
THREADS = 6

Turn = Callable[[], float]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", type=Path)
    parser.add_argument("--keys", nargs="+", choices=VARIANTS, default=VARIANTS, help="the variants")
    options = parser.parse_args()
    task = Task.read(options.task)
    return argparse.Namespace(task=task, keys=options.keys, out=task.out)


def main(options: argparse.Namespace) -> None:
    task: Task = options.task
    variants = make_variants(task, options.keys)
    turns: dict[str, Turn] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name, compiled in compile_all(variants, task.out).items():
        with failing(name, task.out):
            turn, of_variant = start(compiled, variants[name], task)
            check_losses(name, of_variant["losses"], figures.get(BASE, of_variant)["losses"])
            turns[name], figures[name] = turn, of_variant
    seconds = alternate(turns, task.turns)
    for name in [each for each in figures if each != BASE]:
        compared = compare_with_base(seconds[name], seconds[BASE]) | {"base": seconds[BASE]}
        add_result(task.out, figures[name] | compared, name)


def compile_all(variants: Mapping[str, Variant], out: Path) -> dict[str, Any]:
    """Compile the variants in threads. Returns (program, cost, seconds) of each variant that could be compiled.

    XLA tries its candidates on the GPU in one thread at a time, and nothing else runs there meanwhile.
    """

    def compiled(name: str, variant: Variant) -> Any:
        with failing(name, out):
            begin = time.perf_counter()
            program, cost = compile_with_cost(variant.make(), variant.state, *variant.feed)
            return program, cost, time.perf_counter() - begin

    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(variants, pool.map(compiled, variants, variants.values()), strict=True))
    return {name: each for name, each in found.items() if each is not None}


@contextmanager
def failing(name: str, out: Path) -> Iterator[None]:
    """Report an exception as the result of a variant, and continue. An exception of the unchanged step is raised."""
    try:
        yield
    except Exception as error:
        if name == BASE:
            raise
        add_result(out, {"failed": reason(error)}, name)


def start(compiled: Any, variant: Variant, task: Task) -> tuple[Turn, dict[str, Any]]:
    """Take the first steps. Returns a function that times a turn, in seconds per step, and the figures before it."""
    program, cost, seconds = compiled
    state = jax.tree.map(jnp.copy, variant.state)
    figures: dict[str, Any] = {"compile": seconds}
    if cost.needed_bytes is not None:
        figures["needed_bytes"] = cost.needed_bytes
    state, sums = program(state, *variant.feed)
    figures["losses"] = [first_loss(sums)]
    if variant.steps == 1:
        # With the same images, the second loss is that of the updated parameters.
        state, sums = program(state, *variant.feed)
        figures["losses"].append(first_loss(sums))

    def turn() -> float:
        nonlocal state
        dispatches = -(-task.steps // variant.steps)
        begin = time.perf_counter()
        for _ in range(dispatches):
            state, _ = program(state, *variant.feed)
        jax.block_until_ready(state)
        return (time.perf_counter() - begin) / (dispatches * variant.steps)

    for _ in range(-(-task.warmup // variant.steps)):
        state, _ = program(state, *variant.feed)
    return turn, figures


def first_loss(sums: MetricSums) -> float:
    """Return the mean loss of a call's first step."""
    return float(np.ravel(sums.values[..., 0, 0])[0] / np.ravel(sums.values[..., 0, 1])[0])


def compare_with_base(results: list[float], base: list[float]) -> dict[str, Any]:
    """Return the speed as a multiple of the unchanged step's."""
    return {
        "step": statistics.median(results),
        "ratio": statistics.median(base) / statistics.median(results),
        "ratio_of_each_round": [b / a for a, b in zip(results, base, strict=True)],
    }


def check_losses(name: str, losses: Sequence[float], expected: Sequence[float]) -> None:
    """Raise AssertionError if a variant computes other losses than the unchanged step."""
    np.testing.assert_allclose(losses, expected[: len(losses)], rtol=LOSS_TOLERANCE, err_msg=name)


if __name__ == "__main__":
    attempt(main, parse())
