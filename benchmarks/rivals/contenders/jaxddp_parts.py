"""Builds a case with jaxddp's `prepare_training`."""

from dataclasses import replace
from typing import Any

import numpy as np
import optax

from benchmarks.rivals.contenders.case import MEAN, MOMENTUM, STD, Task
from benchmarks.rivals.contenders.jax_case import all_images, join_or_simulate, local_images, network, read_weights
from jaxddp.api import ArrayTable, prepare_training
from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.data.batch import Batch
from jaxddp.setup.run_setup import RunSetup


def make_parts(task: Task, **settings: Any) -> tuple[RunSetup, Batch]:
    """Return the setup of a task, with the common initial weights, and its placed batch.

    Args:
        settings: Further arguments of `prepare_training`.
    """
    join_or_simulate(task)
    case, names = task.case, tuple(map(str, range(task.case.classes)))
    data = DataConfig(mean=MEAN, std=STD, augment=AugmentConfig(flip=False))
    optimizer = optax.sgd(case.learning_rate, MOMENTUM)
    setup = prepare_training(
        network(case), ArrayTable(*all_images(task), names), None, optimizer, case.batch, data=data, **settings
    )
    state = setup.state.replace(params=setup.topology.replicate(read_weights(task, setup.state.params)))
    # The other contenders compute no metrics.
    setup = replace(setup.changed(metrics={}), state=state)
    # Local batch statistics depend on the order of images, so it is the same in all contenders.
    pixels, labels = local_images(task)
    ones, rows = np.ones(len(labels), np.float32), np.arange(len(labels), dtype=np.int32)
    return setup, setup.topology.place(Batch(pixels, labels, ones, rows, np.zeros_like(rows)))


def jitted_step(setup: RunSetup) -> Any:
    """Return the function (state, batch, key) that `setup.step` calls; it can be traced."""
    return setup.layout.way.step(setup.phases, compiler_options=setup.resources.compiler_options)
