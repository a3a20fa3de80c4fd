"""Measures jaxddp's step. `benchmarks/step.py --against …` and `benchmarks/gpu.py` start it."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.rivals.contenders.case import Task
from benchmarks.rivals.contenders.jax_case import run
from benchmarks.rivals.contenders.jaxddp_parts import make_parts
from benchmarks.rivals.contenders.outcome import attempt


def main(task: Task) -> None:
    setup, batch = make_parts(task)
    step, state = setup.step(), setup.state

    def take_step() -> Any:
        nonlocal state
        state, sums = step(state, batch)
        return state, sums

    run(task, setup.topology, take_step, lambda result: result[1].means()["loss"])


if __name__ == "__main__":
    attempt(main, Task.parse())
