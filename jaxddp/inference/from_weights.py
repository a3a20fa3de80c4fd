"""Makes a network for inference from a file of weights, without a run."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.phases import doing
from jaxddp.data.source import Source, image_dtype
from jaxddp.engine.initial_state import replace_by_weights
from jaxddp.engine.state import TrainState
from jaxddp.inference.trained import TrainedRun
from jaxddp.mesh import Topology
from jaxddp.models.variables import shapes_of
from jaxddp.platforms import platform_named
from jaxddp.recipe.make_recipe import model_of
from jaxddp.recipe.user_objects import objects_of_hooks
from jaxddp.setup.initial_weights import WeightsTarget, initial_weights
from jaxddp.weights.places import local_weights
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
    shape, new_layers = source.image_shape(data), config.model.fresh_layers
    shapes = shapes_of(model, shape)
    with doing(f"reading weights from {weights}"):
        path = local_weights(weights, offline=config.model.offline)
        target = WeightsTarget(model, shapes, NUM_CLASSES, image_shape=shape, new_layers=new_layers)
        arrays = initial_weights(path, target, topology)
    fresh, fresh_state = jax.jit(model.init)(jax.random.key(config.seed), jnp.zeros((1, *shape), jnp.float32))
    params, model_state = replace_by_weights(
        fresh, fresh_state, {name: jnp.asarray(array) for name, array in arrays.items()}
    )
    state = topology.replicate(TrainState(jnp.zeros((), jnp.int32), params, model_state, ()))
    names = tuple(map(str, range(NUM_CLASSES)))
    signature = Signature(names, names, shape, np.dtype(image_dtype(source, data)).name, source.pixel_shape is not None)
    return TrainedRun(path, 0, config, model, state, Preprocess.of(config), signature, topology)
