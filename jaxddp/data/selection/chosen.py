"""Images of given rows of a source, for evaluation, or for training without random crops."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.example_set import labels_of
from jaxddp.data.order import EvalOrder
from jaxddp.data.source import Source


@dataclass(frozen=True)
class ChosenOrder(EvalOrder):
    """An evaluation order of the rows `chosen` only."""

    chosen: tuple[int, ...] = field(default=(), repr=False)

    @property
    def num_batches(self) -> int:
        return -(-len(self.chosen) // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        rows = self.chosen[step * self.batch_size : (step + 1) * self.batch_size]
        return np.array([*rows, *[-1] * (self.batch_size - len(rows))], np.int64)


def chosen_images(source: Source, data: DataConfig, rows: np.ndarray) -> np.ndarray:
    """Return the evaluation images, [n, H, W, C], of int[n] rows, n >= 1. Raises: see `Source.eval_batches`."""
    return np.asarray(next(iter(source.eval_batches(_in_one_batch(source, rows), data))).image)


def sample_images(source: Source, data: DataConfig, count: int) -> np.ndarray:
    """Return at most `count` training images, [n, H, W, C], without random crops, in proportion to the classes.

    Raises: InputError if an image cannot be used.
    """
    order, whole = _in_one_batch(source, labels_of(source).share(count)), dataclasses.replace(data, crop="whole")
    return next(iter(source.train_batches(order, whole, range(1), substitutes=source.substitutes(whole)))).image


def _in_one_batch(source: Source, rows: np.ndarray) -> ChosenOrder:
    return ChosenOrder(len(source), len(rows), tuple(rows.tolist()))
