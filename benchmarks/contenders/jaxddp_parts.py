"""A case in this project's objects, as `prepare_training` makes them."""

from dataclasses import dataclass

import numpy as np
import optax
from case import MEAN, MOMENTUM, STD, Task
from jax_case import all_images, lay_out, local_images, network, read_weights

from jaxddp.api import ArrayTable, prepare_training, softmax_cross_entropy
from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.data.batch import Batch
from jaxddp.engine.objective import Objective
from jaxddp.engine.state import TrainState
from jaxddp.experiment.setup import RunSetup


@dataclass(frozen=True)
class Parts:
    """What a step is made of and is given. The state holds the weights that all contenders begin with."""

    setup: RunSetup
    objective: Objective
    state: TrainState
    batch: Batch


def make_parts(task: Task) -> Parts:
    lay_out(task)
    case, names = task.case, tuple(map(str, range(task.case.classes)))
    data = DataConfig(mean=MEAN, std=STD, augment=AugmentConfig(flip=False))
    optimizer = optax.sgd(case.learning_rate, MOMENTUM)
    setup = prepare_training(
        network(case), ArrayTable(*all_images(task), names), None, optimizer, case.batch, data=data
    )
    # Every contender has its images in one order, on which local batch statistics depend.
    pixels, labels = local_images(task)
    ones, rows = np.ones(len(labels), np.float32), np.arange(len(labels), dtype=np.int32)
    batch = setup.topology.place(Batch(pixels, labels, ones, rows, np.zeros_like(rows)))
    state = setup.state.replace(params=setup.topology.replicate(read_weights(task.weights, setup.state.params)))
    return Parts(setup, setup.objective(softmax_cross_entropy, {}), state, batch)
