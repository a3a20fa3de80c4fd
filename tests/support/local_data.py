"""Objects for tests of `data.placement=local`: an order without padding, the data of all processes, and a network."""

import dataclasses
from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxddp.data.arrays import ArrayTable
from jaxddp.data.order import SampleOrder, UnitedOrder
from support.data import CLASSES


class DoubleNet(nn.Module):
    """A network in float64 without batch norm, whose gradient for an image does not depend on other images."""

    @nn.compact
    def __call__(self, images, train: bool):
        x = nn.Conv(4, (3, 3), param_dtype=jnp.float64)(images)
        x = nn.Dense(8, param_dtype=jnp.float64)(nn.tanh(x.reshape(len(x), -1)))
        return nn.Dense(CLASSES, param_dtype=jnp.float64)(nn.tanh(x))


@dataclasses.dataclass(frozen=True)
class Unpadded(SampleOrder):
    """The examples of a `UnitedOrder`, in batches without padding."""

    padded: UnitedOrder

    @classmethod
    def of(cls, padded: UnitedOrder) -> "Unpadded":
        return cls(padded.num_examples, padded.batch_size, padded.seed, padded)

    def rows(self, step: int) -> np.ndarray:
        return (rows := self.padded.rows(step))[rows >= 0]

    def epochs(self, step: int) -> np.ndarray:
        return self.padded.epochs(step)[self.padded.rows(step) >= 0]


def joined(tables: Sequence[ArrayTable]) -> ArrayTable:
    """Return one table of the examples of all tables."""
    images, labels = (np.concatenate([getattr(table, name) for table in tables]) for name in ("images", "labels"))
    return ArrayTable(images, labels, tables[0].class_names)
