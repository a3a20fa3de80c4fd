"""A recipe for `memory.py` whose network rematerializes its blocks in the backward pass."""

import flax.linen as nn
import jax

from jaxddp.config import Config, load

BLOCKS = 8


def get_config() -> Config:
    return load("cifar10")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        return x + nn.Conv(width, (3, 3))(nn.gelu(nn.Conv(width, (3, 3))(nn.LayerNorm()(x))))


class Net(nn.Module):
    width: int
    num_classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (3, 3))(images)
        for _ in range(BLOCKS):
            x = nn.remat(Block)()(x)
        return nn.Dense(self.num_classes)(x.mean((1, 2)))


def get_model(config: Config, num_classes: int) -> Net:
    return Net(config.model.width, num_classes)
