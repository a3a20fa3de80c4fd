"""Trained runs for inference without training: networks with random parameters."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config
from jaxddp.engine.state import TrainState
from jaxddp.inference.trained import TrainedRun
from jaxddp.workdir.signature import Signature
from support.networks import randomized
from support.shared import adapted, topology_of

NAMES = tuple("abcde")


def random_run(model: Any, image: int, *, devices: int = 1, dtype: Any = jnp.float32, **config: Any) -> TrainedRun:
    """Return a run whose network has random parameters, for arrays of `image` pixels and five classes."""
    model, shape = adapted(model), (image, image, 3)
    params, model_state = jax.jit(model.init)(jax.random.key(5), jnp.zeros((1, *shape), dtype))
    topology = topology_of(devices)
    trees = jax.device_get((randomized(params), randomized(model_state, seed=8)))
    state = topology.replicate(TrainState(jnp.zeros((), jnp.int32), *trees, ()))
    return TrainedRun(
        Path("run"),
        0,
        Config().replace(**config),
        model,
        state,
        Preprocess(dtype=dtype),
        Signature(NAMES, NAMES, shape, "uint8", True),
        topology,
    )
