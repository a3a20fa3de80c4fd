"""The images of a few rows, as evaluation sees them, to be looked at."""

from dataclasses import dataclass, field

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.data.order import EvalOrder
from jaxddp.data.source import Source


@dataclass(frozen=True)
class _Chosen(EvalOrder):
    """Some rows in one batch."""

    chosen: tuple[int, ...] = field(default=(), repr=False)

    @property
    def num_batches(self) -> int:
        return 1

    def rows(self, step: int) -> np.ndarray:
        return np.array(self.chosen, np.int64)


def chosen_images(source: Source, data: DataConfig, rows: np.ndarray) -> np.ndarray:
    """The pixels of int[n] rows of a source, n from 1: [n, H, W, C]. Raises: as `Source.eval_batches`."""
    order = _Chosen(len(source), len(rows), tuple(rows.tolist()))
    return np.asarray(next(iter(source.eval_batches(order, data))).image)
