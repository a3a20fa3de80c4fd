"""Counts the FLOPs of a case's step, and measures the device's limits in JAX: bfloat16 matrix products and memory.

`benchmarks/gpu.py` starts it.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.rivals.contenders.case import Task
from benchmarks.rivals.contenders.jaxddp_parts import make_parts
from benchmarks.rivals.contenders.outcome import add_result, attempt
from jaxddp.data.batch import Batch
from jaxddp.measure.cost import count_flops
from jaxddp.setup.run_setup import RunSetup

RUNS, REPEATS = 5, 10


def main(task: Task) -> None:
    setup, batch = make_parts(task)
    topology = setup.topology
    large = topology.platform == "gpu"
    figures = {
        "device": topology.device_kind,
        "flops_an_image": flops_of_step(setup, batch) / task.case.batch,
        "matmul_flops_a_second": matmul_speed(8192 if large else 512),
        "memory_bytes_a_second": memory_speed(1 << (30 if large else 22)),
    }
    add_result(task.out, figures | {"version": jax.__version__})


def flops_of_step(setup: RunSetup, batch: Batch) -> int:
    step = setup.compiled_steps(resident=False).function
    return count_flops(step.trace(setup.state, batch).jaxpr).total()


def matmul_speed(side: int) -> float:
    """Return the FLOPs per second of a product of square bfloat16 matrices."""
    a, b = (jax.random.normal(jax.random.key(seed), (side, side), jnp.bfloat16) for seed in (0, 1))
    return 2 * side**3 / seconds(jax.jit(jnp.matmul), a, b)


def memory_speed(count: int) -> float:
    """Return the bytes read and written per second when scaling `count` bfloat16 numbers."""
    x = jnp.ones(count, jnp.bfloat16)
    return 2 * x.nbytes / seconds(jax.jit(lambda x: 3 * x), x)


def seconds(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    """Return the median seconds of a call, without the first, which compiles."""
    jax.block_until_ready(function(*arguments))
    found = []
    for _ in range(RUNS):
        begin, results = time.perf_counter(), None
        for _ in range(REPEATS):
            results = function(*arguments)
        jax.block_until_ready(results)
        found.append((time.perf_counter() - begin) / REPEATS)
    return statistics.median(found)


if __name__ == "__main__":
    attempt(main, Task.parse())
