"""The step of this project, as `prepare_training` makes it. Started by `benchmarks/step.py --against …`."""

from typing import Any

from case import Task
from jax_case import run
from jaxddp_parts import make_parts

from jaxddp.engine.step import make_train_step


def main() -> None:
    task = Task.parse()
    parts = make_parts(task)
    setup, state = parts.setup, parts.state
    step = make_train_step(parts.objective, setup.optimizer, setup.topology)

    def take_step() -> Any:
        nonlocal state
        state, sums = step(state, parts.batch)
        return state, sums

    run(task, setup.topology, take_step, lambda result: result[1].means()["loss"])


if __name__ == "__main__":
    main()
