"""Traces a few of jaxddp's steps with JAX's profiler. `benchmarks/gpu.py` starts it."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.rivals.contenders.case import Task
from benchmarks.rivals.contenders.jaxddp_parts import jitted_step, make_parts
from benchmarks.rivals.contenders.outcome import add_result, attempt
from benchmarks.rivals.contenders.trace_summary import instruction_bytes, traced
from jaxddp.measure.cost import compile_with_cost


@dataclass(frozen=True)
class Options:
    task: Task
    trace: Path

    @property
    def out(self) -> Path:
        return self.task.out


def parse() -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", type=Path)
    parser.add_argument("--trace", type=Path, required=True, help="folder for the trace")
    options = parser.parse_args()
    return Options(Task.read(options.task), options.trace)


def main(options: Options) -> None:
    task = options.task
    setup, batch = make_parts(task)
    state = setup.state
    step, _ = compile_with_cost(jitted_step(setup), state, batch, setup.key)
    for _ in range(1 + task.warmup):
        state, _ = step(state, batch, setup.key)
    jax.block_until_ready(state)
    with traced(options.trace) as summary:
        for _ in range(task.steps):
            state, _ = step(state, batch, setup.key)
        jax.block_until_ready(state)
    program = step.as_text()
    (options.trace / "program.txt").write_text(program)
    moved = instruction_bytes(program)
    of_kernels = {name: moved[name] * count / ms * 1e3 for name, ms, count in summary["kernels"] if name in moved}
    add_result(task.out, summary | {"steps": task.steps, "bytes_a_second": of_kernels})


if __name__ == "__main__":
    attempt(main, parse())
