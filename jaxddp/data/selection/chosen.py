"""The images of a few rows of a source: as evaluation sees them, and as training does, without random crops."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.example_set import labels_of
from jaxddp.data.order import EvalOrder
from jaxddp.data.source import Source


@dataclass(frozen=True)
class ChosenOrder(EvalOrder):
    """Some rows of N, once, in the order in which they are given."""

    chosen: tuple[int, ...] = field(default=(), repr=False)

    @property
    def num_batches(self) -> int:
        return -(-len(self.chosen) // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        own = self.chosen[step * self.batch_size : (step + 1) * self.batch_size]
        return np.array([*own, *[-1] * (self.batch_size - len(own))], np.int64)


def chosen_images(source: Source, data: DataConfig, rows: np.ndarray) -> np.ndarray:
    """The pixels of int[n] rows of a source, n from 1: [n, H, W, C]. Raises: as `Source.eval_batches`."""
    return np.asarray(next(iter(source.eval_batches(_in_one_batch(source, rows), data))).image)


def sample_images(source: Source, data: DataConfig, count: int) -> np.ndarray:
    """Training images without random crops, [count, H, W, C], of each class its share; all if there are fewer.

    Raises `InputError` for an image that cannot be used.
    """
    order, whole = _in_one_batch(source, labels_of(source).share(count)), dataclasses.replace(data, crop="whole")
    return next(iter(source.train_batches(order, whole, range(1), substitutes=source.substitutes(whole)))).image


def _in_one_batch(source: Source, rows: np.ndarray) -> ChosenOrder:
    return ChosenOrder(len(source), len(rows), tuple(rows.tolist()))
