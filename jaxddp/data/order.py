"""Which example goes where: the rows of every global batch, a function of the step.

Nothing here has a position to save. Global batch t depends on (num_examples, batch_size, seed, t) alone, so a run
resumes by asking for the next step, and any number of hosts cut the same batches into their shards.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from jaxddp.errors import InputError

MAX_SEED = 2**63 - 1
"""Seeds fit an int64, the widest integer that the orders, TensorFlow's and JAX's random keys have in common."""

MAX_EXAMPLES = 2**31 - 1
"""Rows fit an int32, as they travel in a `Batch`."""


class Order(Protocol):
    """What a source of batches needs to know: the rows of a step's global batch, and the epoch of each."""

    @property
    def num_examples(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    def rows(self, step: int) -> np.ndarray: ...

    def epochs(self, step: int) -> np.ndarray: ...


@dataclass(frozen=True)
class SampleOrder:
    """The training order: epochs follow each other as one stream of examples, cut into batches of one size.

    Nothing is dropped: a batch may begin in one epoch and end in the next, and every example appears exactly once in
    each epoch's stretch of `num_examples` places.

    Args:
        num_examples: N, the length of the table.
        batch_size: B, the global batch, at most N.
        seed: 0..2**63-1.
        shuffle: False keeps the table's order in every epoch.

    Raises:
        InputError: a size below 1, a batch larger than the data set, a seed out of range.
    """

    num_examples: int
    batch_size: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        _check_sizes(self.num_examples, self.batch_size)
        check_seed(self.seed)
        if self.batch_size > self.num_examples:
            raise InputError(
                f"batch size {self.batch_size}: the batch is larger than the data set of {self.num_examples} examples; "
                f"use at most {self.num_examples}"
            )

    def steps(self, epochs: int) -> int:
        """The number of steps after which `epochs` epochs have been seen: ceil(epochs * N / B)."""
        return -(-epochs * self.num_examples // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        """The rows of the global batch, int64[batch_size]."""
        epochs, places = np.divmod(self._positions(step), self.num_examples)
        if not self.shuffle:
            return places
        rows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = permutation(self.num_examples, self.seed, int(epoch))[places[here]]
        return rows

    def epochs(self, step: int) -> np.ndarray:
        """The epoch that each of `rows(step)` belongs to, int64[batch_size]."""
        return self._positions(step) // self.num_examples

    def _positions(self, step: int) -> np.ndarray:
        return _positions(step, self.batch_size)


@dataclass(frozen=True)
class EvalOrder:
    """The evaluation order: every row once, in the table's order, the last batch filled up with -1.

    Args:
        num_examples: N, the length of the table.
        batch_size: B, the global batch; it may be larger than N.

    Raises:
        InputError: a size below 1.
    """

    num_examples: int
    batch_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.num_examples, self.batch_size)

    @property
    def num_batches(self) -> int:
        """ceil(N / B)."""
        return -(-self.num_examples // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        """The rows of the global batch, int64[batch_size], -1 where it is padded."""
        rows = _positions(step, self.batch_size)
        return np.where(rows < self.num_examples, rows, -1)

    def epochs(self, step: int) -> np.ndarray:
        """Zeros, int64[batch_size]: evaluation has no epochs."""
        return np.zeros(self.batch_size, np.int64)


@lru_cache(maxsize=4)
def permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """One epoch's order of the rows: int64[num_examples], read-only, each row once.

    Philox's raw words (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) are fixed by its
    definition, whereas NumPy may change what `Generator.permutation` makes of them; sorting them stably leaves nothing
    to the release. The cache keeps the two epochs that a batch can span for the one who reads ahead and the one who
    follows.
    """
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_examples)
    rows = np.argsort(words, kind="stable")
    rows.flags.writeable = False
    return rows


def shard(values: np.ndarray, index: int, count: int) -> np.ndarray:
    """Part `index` of `count` equal contiguous parts of a global batch's values.

    Raises:
        InputError: the batch does not divide by `count`, or there is no part `index`.
    """
    size, rest = divmod(len(values), count)
    if rest:
        sizes = f"{size * count} or {(size + 1) * count}" if size else f"{count}"
        raise InputError(f"batch size {len(values)} does not divide into {count} equal parts; use {sizes}")
    if not 0 <= index < count:
        raise InputError(f"part {index} of a batch that is cut into {count}: use 0..{count - 1}")
    return values[index * size : (index + 1) * size]


def check_seed(seed: int) -> None:
    """Raises `InputError` unless 0 <= seed <= MAX_SEED."""
    if not 0 <= seed <= MAX_SEED:
        raise InputError(f"seed {seed}: use an integer from 0 to 2**63-1 ({MAX_SEED})")


def _positions(step: int, batch_size: int) -> np.ndarray:
    """The places of a batch in the stream of all examples, int64[batch_size]."""
    if step < 0:
        raise InputError(f"step {step}: steps count from 0")
    return step * batch_size + np.arange(batch_size, dtype=np.int64)


def _check_sizes(num_examples: int, batch_size: int) -> None:
    if not 1 <= num_examples <= MAX_EXAMPLES:
        raise InputError(f"{num_examples} examples: an order needs between 1 and {MAX_EXAMPLES}")
    if batch_size < 1:
        raise InputError(f"batch size {batch_size}: use at least 1")
