"""The step of this project, as `prepare_training` makes it. Started by `benchmarks/step.py --against …`."""

from typing import Any

import numpy as np
import optax
from case import MEAN, MOMENTUM, STD, Task
from jax_case import all_images, lay_out, local_images, network, read_weights, run

from jaxddp.api import ArrayTable, prepare_training, softmax_cross_entropy
from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.data.batch import Batch
from jaxddp.engine.step import make_train_step


def main() -> None:
    task = Task.parse()
    lay_out(task)
    case, names = task.case, tuple(map(str, range(task.case.classes)))
    data = DataConfig(mean=MEAN, std=STD, augment=AugmentConfig(flip=False))
    optimizer = optax.sgd(case.learning_rate, MOMENTUM)
    setup = prepare_training(
        network(case), ArrayTable(*all_images(task), names), None, optimizer, case.batch, data=data
    )
    step = make_train_step(setup.objective(softmax_cross_entropy, {}), setup.optimizer, setup.topology)

    # Every contender has its images in one order, on which local batch statistics depend.
    pixels, labels = local_images(task)
    ones, rows = np.ones(len(labels), np.float32), np.arange(len(labels), dtype=np.int32)
    batch = setup.topology.place(Batch(pixels, labels, ones, rows, np.zeros_like(rows)))
    state = setup.state.replace(params=setup.topology.replicate(read_weights(task.weights, setup.state.params)))

    def take_step() -> Any:
        nonlocal state
        state, sums = step(state, batch)
        return state, sums

    run(task, setup.topology, take_step, lambda result: result[1].means()["loss"])


if __name__ == "__main__":
    main()
