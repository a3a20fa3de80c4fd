"""What a checkpoint of a run says of the run's validation data."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import jaxddp.files as files
from jaxddp.config import DataConfig
from jaxddp.data.source import Source
from jaxddp.engine.step import make_predict
from jaxddp.errors import InputError
from jaxddp.experiment.experiment import open_experiment
from jaxddp.recipe_file import CONFIG_FILE, read_recipe
from jaxddp.reports.outcome import Outcome
from jaxddp.training.checkpoints import Checkpoints
from jaxddp.training.manifest import CHECKPOINTS


class Validated(NamedTuple):
    """An outcome, and the images that it is of."""

    outcome: Outcome
    source: Source
    data: DataConfig


def validated(directory: Path, which: str) -> Validated:
    """The predictions of a checkpoint ("latest", "best" or a step) on one device, as evaluation makes them.

    "best" is the latest where nothing was validated.

    Raises:
        InputError: the run does not say its network, or its data or its checkpoint cannot be read.
    """
    place = directory / CONFIG_FILE
    file = read_recipe(place)
    if "model" not in json.loads(files.read(place)):
        raise InputError(f"{place}: the run came from Python and does not say its network")
    # On what a run is looked at does not depend on what it was trained on.
    here = {"devices": 1, "cpu_devices": None, "buckets": None, "xla_options": ()}
    file = dataclasses.replace(file, config=file.config.replace(parallel=here))
    with Checkpoints(directory / CHECKPOINTS, read_only=True) as checkpoints:
        step = checkpoints.step("latest" if which == "best" and checkpoints.best() is None else which)
        checkpoints.verify(step)
        experiment = open_experiment(file)
        setup, source = experiment.setup(fresh=False), experiment.resources.val
        assert source is not None  # a config names both
        state, _ = checkpoints.restore(step, setup.state)
    predict = make_predict(setup.eval_objective(), setup.topology)
    probabilities = [
        np.asarray(jax.nn.softmax(predict(state, batch).astype(np.float32)))[np.asarray(batch.mask) > 0]
        for batch in setup.feed.eval_batches(source, experiment.config.eval.batch_size)
    ]
    outcome = Outcome(np.asarray(source.labels), np.concatenate(probabilities), tuple(source.class_names), step)
    return Validated(outcome, source, experiment.config.data)
