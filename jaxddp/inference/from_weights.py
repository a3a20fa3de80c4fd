"""Makes a network for inference from a file of weights, without a run."""

from pathlib import Path

import numpy as np

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config
from jaxddp.core.errors import InputError, Key
from jaxddp.data.source import Source, image_dtype
from jaxddp.inference.trained import TrainedRun
from jaxddp.mesh import Topology
from jaxddp.platforms import platform_named
from jaxddp.setup.initial_weights import state_of_weights
from jaxddp.setup.recipe import model_of
from jaxddp.setup.user_objects import objects_of_hooks
from jaxddp.workdir.signature import Signature

NUM_CLASSES = 1000
"""The number of classes of the network, as in ImageNet. A head for another number of classes is not loaded."""


def network_of_weights(config: Config, source: Source, topology: Topology) -> TrainedRun:
    """Return the network `model.name` with the weights `model.weights`, for the images of a source.

    The weights are a file, or a name as in `jaxddp weights`.

    Its classes are numbered from 0. Features do not depend on the head, which may be missing in the weights.

    Raises:
        InputError: the weights cannot be read, or are of another network.
    """
    weights = config.model.weights
    if weights is None:
        raise InputError(Key("model.weights"), ": is not set", advice="give a file of weights")
    if config.train.precision is None:
        config = config.replace(train={"precision": platform_named(topology.platform).precision})
    model = model_of(config, NUM_CLASSES, objects_of_hooks({}))
    data = config.data.of_evaluation
    shape = source.image_shape(data)
    path, state = state_of_weights(config, model, shape, range(NUM_CLASSES), topology)
    names = tuple(map(str, range(NUM_CLASSES)))
    signature = Signature(names, names, shape, np.dtype(image_dtype(source, data)).name, source.pixel_shape is not None)
    return TrainedRun(path or Path(), 0, config, model, state, Preprocess.of(config), signature, topology)
