"""Which examples each global batch holds, as a function of the step.

No position is saved. Global batch t depends on (num_examples, batch_size, seed, t) alone, so a run
resumes by asking for the next step, and any number of hosts divide the same batches into their shards.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.ranges import Count, Seed
from jaxddp.core.wording import counted
from jaxddp.overrides import check_values


class Shard(NamedTuple):
    """Which of `count` equal contiguous parts of every global batch a process gets; all of it by default."""

    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]: a tuple's own methods
    count: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]

    def of(self, values: np.ndarray) -> np.ndarray:
        """This part of a batch's values. Raises `InputError` where there is none, or the batch does not divide."""
        size, rest = divmod(len(values), self.count)
        if rest:
            sizes = f"{size * self.count} or {(size + 1) * self.count}" if size else f"{self.count}"
            raise InputError(f"batch size {len(values)} does not divide into {self.count} equal parts; use {sizes}")
        if not 0 <= self.index < self.count:
            raise InputError(f"part {self.index} of a batch that is cut into {self.count}: use 0..{self.count - 1}")
        return values[self.index * size : (self.index + 1) * size]


WHOLE = Shard()
"""The global batch, uncut."""
# Where an order has an epoch's number, and beyond all of them.
_UNLABELLED = 0x756E6C6162656C


@dataclass(frozen=True)
class SampleOrder:
    """The training order: epochs follow each other as one stream of examples, cut into batches of one size.

    Nothing is dropped: a batch may begin in one epoch and end in the next, and every example appears exactly once in
    each epoch's stretch of `num_examples` places.

    Raises `InputError` for a size below 1, a batch larger than the data set, or a seed out of 0..2**63-1.
    """

    num_examples: Count
    batch_size: Count
    seed: Seed

    def __post_init__(self) -> None:
        check_values(self)
        if self.batch_size > self.num_examples:
            raise InputError(
                f"batch size {self.batch_size}: the batch is larger than the data set of "
                f"{counted(self.num_examples, 'example')}; use at most {self.num_examples}"
            )

    def steps(self, epochs: int) -> int:
        """The number of steps after which `epochs` epochs have been seen: ceil(epochs * N / B)."""
        return -(-epochs * self.num_examples // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        """The rows of the global batch, int64[batch_size]."""
        epochs, places = np.divmod(positions(step, self.batch_size), self.num_examples)
        rows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = permutation(self.num_examples, self.seed, int(epoch))[places[here]]
        return rows

    def epochs(self, step: int) -> np.ndarray:
        """The epoch that each of `rows(step)` belongs to, int64[batch_size]."""
        return self.stretches(step)

    def stretches(self, step: int) -> np.ndarray:
        """In which epoch's stretch of `num_examples` places each of `rows(step)` lies, int64[batch_size]."""
        return positions(step, self.batch_size) // self.num_examples


@dataclass(frozen=True)
class EvalOrder:
    """The evaluation order: every row once, in the table's order, the last batch filled up with -1.

    A batch may be larger than the data set. Raises `InputError` for a size below 1.
    """

    num_examples: Count
    batch_size: Count

    seed = 0
    """Nothing is drawn in evaluation."""

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def num_batches(self) -> int:
        """ceil(N / B)."""
        return -(-self.num_examples // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        """The rows of the global batch, int64[batch_size], -1 where it is padded."""
        rows = positions(step, self.batch_size)
        return np.where(rows < self.num_examples, rows, -1)

    def epochs(self, step: int) -> np.ndarray:
        return np.zeros(self.batch_size, np.int64)

    def stretches(self, step: int) -> np.ndarray:
        return np.zeros(self.batch_size, np.int64)


Order = SampleOrder | EvalOrder


@lru_cache(maxsize=4)
def permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """One epoch's order of the rows: int64[num_examples], read-only, each row once.

    Philox's raw words (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) are fixed by its
    definition, whereas NumPy may change `Generator.permutation`; a stable sort is the same in every release. The cache
    keeps the two epochs that a batch can span, for the thread that reads ahead and for the one that follows.
    """
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_examples)
    rows = np.argsort(words, kind="stable")
    rows.flags.writeable = False
    return rows


def unlabelled_seed(seed: int) -> int:
    """The seed of a run's second source, whose order, crops and augmentation are not those of the first."""
    return int(np.random.Philox(key=np.array([seed, _UNLABELLED], np.uint64)).random_raw()) >> 1


def positions(step: int, batch_size: int) -> np.ndarray:
    """The places of a batch in the stream of all examples, int64[batch_size]."""
    if step < 0:
        raise InputError(f"step {step}: steps count from 0")
    return step * batch_size + np.arange(batch_size, dtype=np.int64)
