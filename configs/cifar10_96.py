"""A deeper and wider network on CIFAR-10 in 37 epochs, with SGD and Lookahead, for 96%: 4.9 PFLOP in total.

    jaxddp train cifar10_96 --data.path DIR

Jordan 2024 (arXiv:2404.00498), the variant for 96% (airbench96.py of github.com/KellerJordan/cifar10-airbench, without
the data filtering of its later variant). `cifar10_fast_sgd` tells the differences from the source. They apply here too.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxddp.config import Config, Reference, load

reference = Reference(0.9603, "airbench96.py of github.com/KellerJordan/cifar10-airbench", runs=400)

CUTOUT = 12
"""Side of the square that is set to the mean color, in pixels."""


def get_config() -> Config:
    return load("cifar10_fast_sgd").replace(
        data={"augment": {"pad": 4}},
        model={"name": "airbench96"},
        train={"duration": "37 epochs"},
        optimizer={"learning_rate": 1.174, "weight_decay": 1.333e-3, "warmup": "10%", "end_factor": 0.0},
    )


def get_augmentation(config: Config) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return cutout whose square lies inside the image. That of `data.augment.cutout` may cross its border."""

    def cutout(key: jax.Array, image: jax.Array) -> jax.Array:
        side = config.data.image_size
        corner = jax.random.randint(key, (2, 1), 0, side - CUTOUT + 1)
        rows, columns = (jnp.arange(side) >= corner) & (jnp.arange(side) < corner + CUTOUT)
        return jnp.where((rows[:, None] & columns)[..., None], 0, image)

    return cutout
