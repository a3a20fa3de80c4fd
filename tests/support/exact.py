"""Training runs whose results are compared bit for bit."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxddp.config import AugmentConfig, Config, DataConfig
from support.data import CLASSES, random_table
from support.runs import setup_of, train

REPRODUCIBLE = {"parallel": {"reproducible": True}}
OPTIMIZER, TABLE = optax.adamw(0.01), random_table(96, image=8)


class Net(nn.Module):
    """A network whose results may depend on the number of devices: by statistics, dropout, a gradient that ends with a
    product, and a gradient that is a sum over images, to which a shard of one image adds nothing."""

    @nn.compact
    def __call__(self, images, train: bool):
        kernel = self.param("kernel", nn.initializers.he_normal(), (3, 3, 3, 8))
        kernel = kernel * jax.lax.rsqrt(jnp.square(kernel).mean((0, 1, 2)) + 1e-5)
        x = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x + self.param("place", nn.initializers.normal(0.1), x.shape[1:]))
        x = nn.Dropout(0.3, deterministic=not train)(x.mean((1, 2)))
        counted = self.variable("counters", "steps", lambda: jnp.zeros((), jnp.int32))
        if train:
            counted.value = counted.value + 1
        return nn.Dense(CLASSES)(x)


def bytes_of(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]


def trained(devices: int, model=None, *, accumulate: int = 1, batch_size: int = 16, cache: str = "none", pad: int = 0):
    data = DataConfig(augment=AugmentConfig(flip=pad > 0, pad=pad), cache=cache)
    config = Config().replace(train={"accumulate": accumulate}, **REPRODUCIBLE)
    setup = setup_of(model or Net(), OPTIMIZER, TABLE, devices=devices, config=config, data=data, batch_size=batch_size)
    return train(setup, {"train": {"duration": "5 steps"}, "log": {"every": "5 steps"}})
