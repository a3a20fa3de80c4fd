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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.common.harness import Figures
from benchmarks.rivals.contenders.case import Task
from benchmarks.rivals.contenders.outcome import add_result, attempt, reason
from benchmarks.rivals.contenders.step_variants import BASE, VARIANTS, Variant, variant_makers
from jaxddp.engine.objective import MetricSums
from jaxddp.measure.cost import compile_with_cost

# In bfloat16 a different order of additions shows in the third digit.
LOSS_TOLERANCE = 0.02
THREADS = 6

Turn = Callable[[], float]


class Compiled(NamedTuple):
    variant: Variant
    program: Any
    needed_bytes: int | None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", type=Path)
    parser.add_argument("--keys", nargs="+", choices=VARIANTS, default=VARIANTS, help="the variants")
    options = parser.parse_args()
    options.task = Task.read(options.task)
    options.out = options.task.out
    return options


def main(options: argparse.Namespace) -> None:
    task: Task = options.task
    makers, turns = variant_makers(task), {}
    figures: dict[str, Figures] = {}
    for name, compiled in compile_all({name: makers[name] for name in (BASE, *options.keys)}, task.out).items():
        with reporting_failure(name, task.out):
            turn, of_variant = start(compiled, task)
            check_losses(name, of_variant["losses"], figures.get(BASE, of_variant)["losses"])
            turns[name], figures[name] = turn, of_variant
    for seconds in rounds(turns, task):
        for name in [each for each in seconds if each != BASE]:
            compared = compare_with_base(seconds[name], seconds[BASE]) | {"base": seconds[BASE]}
            add_result(task.out, figures[name] | compared, name)


def compile_all(makers: Mapping[str, Callable[[], Variant]], out: Path) -> dict[str, Compiled]:
    """Compile variants in threads, and return those that could be compiled.

    The compilation of ResNet-50 with XLA's search for algorithms takes half a minute. The search uses the GPU in one
    thread at a time.
    """
    found: dict[str, Compiled] = {}

    def compile_variant(name: str) -> None:
        with reporting_failure(name, out):
            variant = makers[name]()
            program, cost = compile_with_cost(variant.program, variant.state, *variant.feed)
            found[name] = Compiled(variant, program, needed_bytes(cost.memory))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(compile_variant, makers))
    return {name: found[name] for name in makers if name in found}


def needed_bytes(stats: Any) -> int | None:
    """Return the bytes that a program needs; None if unknown. Memory that an output shares counts once."""
    if stats is None:
        return None
    output = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + output + stats.temp_size_in_bytes


@contextmanager
def reporting_failure(name: str, out: Path) -> Iterator[None]:
    """Report an exception as the result of a variant, and continue. An exception of the unchanged step is raised."""
    try:
        yield
    except Exception as error:
        if name == BASE:
            raise
        add_result(out, {"failed": reason(error)}, name)


def start(compiled: Compiled, task: Task) -> tuple[Turn, Figures]:
    """Take the first steps. Returns a function that times a turn, in seconds per step, and the figures before it."""
    variant, program, needed_bytes = compiled
    state = jax.tree.map(jnp.copy, variant.state)
    figures: Figures = {} if needed_bytes is None else {"needed_bytes": needed_bytes}
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


def rounds(turns: Mapping[str, Turn], task: Task) -> Iterator[dict[str, list[float]]]:
    """Yield the seconds of all turns so far, after each round. The order alternates between rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(task.turns):
        for name in list(seconds)[:: 1 if number % 2 else -1]:
            with reporting_failure(name, task.out):
                seconds[name].append(turns[name]())
        seconds = {name: each for name, each in seconds.items() if len(each) == number + 1}
        yield seconds


def first_loss(sums: MetricSums) -> float:
    """Return the mean loss of a call's first step."""
    return float(np.ravel(sums.values[..., 0, 0])[0] / np.ravel(sums.values[..., 0, 1])[0])


def compare_with_base(results: list[float], base: list[float]) -> Figures:
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
