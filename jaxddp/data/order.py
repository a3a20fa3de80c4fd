"""The examples of each global batch, as a function of the step.

No position is saved. Global batch t depends on (num_examples, batch_size, seed, t) alone, so a run resumes by computing
the next step, and any number of hosts divide the same batches into their shards.
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
    """A process's part of each global batch: number `index` of `count` equal contiguous parts; the whole by default."""

    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]: a tuple's own methods
    count: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]

    def of(self, values: np.ndarray) -> np.ndarray:
        """Return this part of a batch's values.

        Raises:
            InputError: there is no such part, or the batch does not divide into equal parts.
        """
        size, rest = divmod(len(values), self.count)
        if rest:
            sizes = f"{size * self.count} or {(size + 1) * self.count}" if size else f"{self.count}"
            raise InputError(f"batch size {len(values)} does not divide into {self.count} equal parts; use {sizes}")
        if not 0 <= self.index < self.count:
            raise InputError(f"part {self.index} of a batch of {self.count} parts: use 0..{self.count - 1}")
        return values[self.index * size : (self.index + 1) * size]


WHOLE = Shard()
"""The whole global batch."""
# The second word of Philox's key in `unlabelled_seed`. In `permutation`, that word is the epoch, which is never this
# large, so the two functions never use the same key.
_UNLABELLED = 0x756E6C6162656C


@dataclass(frozen=True)
class SampleOrder:
    """The training order: epochs follow each other as one stream of examples, divided into batches of equal size.

    No example is dropped: a batch may begin in one epoch and end in the next. Every example appears exactly once in
    each epoch, which is a stretch of `num_examples` positions.

    Raises:
        InputError: a size is below 1, the batch is larger than the data set, or the seed is out of 0..2**63-1.
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
        """Return the number of steps for `epochs` epochs: ceil(epochs * N / B)."""
        return -(-epochs * self.num_examples // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the global batch, int64[batch_size]."""
        epochs, places = np.divmod(positions(step, self.batch_size), self.num_examples)
        rows = np.empty_like(places)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            rows[inside] = permutation(self.num_examples, self.seed, int(epoch))[places[inside]]
        return rows

    def epochs(self, step: int) -> np.ndarray:
        """Return the epoch of each of `rows(step)`, int64[batch_size]."""
        return self.stretches(step)

    def stretches(self, step: int) -> np.ndarray:
        """Return, for each of `rows(step)`, how many times `num_examples` positions came before, int64[batch_size]."""
        return positions(step, self.batch_size) // self.num_examples


@dataclass(frozen=True)
class EvalOrder:
    """The evaluation order: every row once, in the table's order; -1 fills the last batch.

    A batch may be larger than the data set. Raises: InputError if a size is below 1.
    """

    num_examples: Count
    batch_size: Count

    seed = 0
    """A constant, because evaluation draws nothing at random."""

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def num_batches(self) -> int:
        """ceil(N / B)."""
        return -(-self.num_examples // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the global batch, int64[batch_size]; -1 where it is padded."""
        rows = positions(step, self.batch_size)
        return np.where(rows < self.num_examples, rows, -1)

    def epochs(self, step: int) -> np.ndarray:
        return np.zeros(self.batch_size, np.int64)

    def stretches(self, step: int) -> np.ndarray:
        return np.zeros(self.batch_size, np.int64)


Order = SampleOrder | EvalOrder


@lru_cache(maxsize=4)
def permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Return one epoch's order of the rows: int64[num_examples], read-only, each row once.

    The definition of Philox fixes its raw words (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
    2011), and a stable sort has one result, so the order is the same with every release of NumPy. NumPy may change
    `Generator.permutation`. The cache holds the two epochs that a batch can span, for each of two threads, because one
    thread reads ahead of the other.
    """
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_examples)
    rows = np.argsort(words, kind="stable")
    rows.flags.writeable = False
    return rows


def unlabelled_seed(seed: int) -> int:
    """Return the seed of a run's second source, which has other orders, crops and augmentations than the first."""
    return int(np.random.Philox(key=np.array([seed, _UNLABELLED], np.uint64)).random_raw()) >> 1


def positions(step: int, batch_size: int) -> np.ndarray:
    """Return the positions of a batch in the stream of all examples, int64[batch_size]."""
    if step < 0:
        raise InputError(f"step {step}: the first step is 0")
    return step * batch_size + np.arange(batch_size, dtype=np.int64)
