"""Compiles the data-parallel step of plain Flax for devices, which need not be present."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.programs.config_step import shapes
from benchmarks.rivals.contenders.case import STAGES, Case
from benchmarks.rivals.contenders.flax_step import ResNet, make_state, make_step
from jaxddp.config import Config
from jaxddp.core.errors import InputError, Key
from jaxddp.mesh import Topology


def compile_flax_step(config: Config, topology: Topology, classes: int) -> Any:
    """Compile the step of the same network, batch and precision as in a config, without its other settings.

    Raises:
        InputError: The network is not one of the ResNets that the rival has.
    """
    model, size = config.model, config.data.image_size
    if model.name not in STAGES:
        raise InputError(Key("model.name", model.name), f": the step of Flax is only for {', '.join(STAGES)}")
    images = config.train.batch_size // topology.num_devices
    stem, width = model.stem or "imagenet", model.width or 64
    case = Case(model.name, stem, width, size, images, classes, str(config.train.precision))
    network = ResNet(case)
    example = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    state = jax.eval_shape(lambda x: make_state(network, network.init(jax.random.key(0), x)), example)
    batch = config.train.batch_size
    pixels = jax.ShapeDtypeStruct((batch, size, size, 3), np.uint8)
    labels = jax.ShapeDtypeStruct((batch,), np.int32)
    arguments = shapes(state, topology.replicated), *shapes((pixels, labels), topology.sharded)
    return make_step(topology.mesh).lower(*arguments).compile()
