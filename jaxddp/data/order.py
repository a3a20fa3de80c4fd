"""The examples of each global batch, as a function of the step.

The global batch of step t depends only on (num_examples, batch_size, seed, t). So a run resumes without a saved
position in the data, and the global batches are the same for any number of hosts.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.ranges import Count, Seed
from jaxddp.core.wording import counted
from jaxddp.overrides import check_values


class Shard(NamedTuple):
    """The part of each global batch for one process: part `index` of `count` contiguous parts; by default all.

    The parts are equal unless the devices have slices of different sizes. In this case, a part has a slot for each
    device of the process. All slots have the size of the largest slice, and end with padding.

    Attributes:
        sizes: the number of examples of each device's slice, in mesh order; empty if the slices are equal. The sizes
            are scaled for batches whose size is a multiple of their sum.
        shares, microbatches: the number of equal slices, and of their equal parts. Part i of all slices together is
            part i of the batch. So a batch norm that is computed for the microbatches of all devices together has the
            same images for any number of slices.
    """

    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]: a tuple's own methods
    count: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]
    sizes: tuple[int, ...] = ()
    shares: int = 1
    microbatches: int = 1

    def of(self, values: np.ndarray, padding: int = -1) -> np.ndarray:
        """Return this part of the values of a global batch.

        Args:
            padding: the value of padding.

        Raises:
            InputError: there is no such part, or the batch does not divide into such parts.
        """
        if not 0 <= self.index < self.count:
            raise InputError(f"part {self.index} of a batch of {self.count} parts: use 0..{self.count - 1}")
        if self.sizes:
            slices = self._slices(len(values))
            slots = np.full((len(slices), self.slots(len(values)) // len(slices)), padding, values.dtype)
            for slot, place in zip(slots, slices, strict=True):
                slot[: place.stop - place.start] = values[place]
            return slots.reshape(-1)
        size, rest = divmod(len(values), self.count)
        if rest:
            sizes = f"{size * self.count} or {(size + 1) * self.count}" if size else f"{self.count}"
            raise InputError(f"batch size {len(values)} does not divide into {self.count} equal parts; use {sizes}")
        if self.microbatches > 1:
            parts = values.reshape(self.microbatches, self.shares, -1)
            values = parts.swapaxes(0, 1).reshape(-1)
        return values[self.index * size : (self.index + 1) * size]

    def slots(self, batch_size: int) -> int:
        """Return the length of the result of `of` for a batch of this size, with padding."""
        if self.sizes:
            return len(self.sizes) // self.count * max(self.sizes) * batch_size // sum(self.sizes)
        return batch_size // self.count

    def examples(self, batch_size: int) -> int:
        """Return the number of examples of this part of a batch, without the padding of slots."""
        if self.sizes:
            return sum(place.stop - place.start for place in self._slices(batch_size))
        return batch_size // self.count

    def _slices(self, batch_size: int) -> list[slice]:
        """Return the places in the global batch of the slices of this process's devices."""
        factor, rest = divmod(batch_size, sum(self.sizes))
        devices, uneven = divmod(len(self.sizes), self.count)
        if rest or uneven:
            raise InputError(
                f"batch size {batch_size} does not divide into {self.count} parts with slices of {self.sizes}"
            )
        ends = [0, *(factor * end for end in itertools.accumulate(self.sizes))]
        slices = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
        return slices[self.index * devices : (self.index + 1) * devices]


WHOLE = Shard()
"""The whole global batch."""
# The second word of Philox's key in `unlabelled_seed`. The second word in `permutation` is the epoch, which is always
# smaller, so the two functions never use the same key.
_UNLABELLED_KEY = 0x756E6C6162656C


@dataclass(frozen=True)
class SampleOrder:
    """The training order: a stream of shuffled epochs, divided into batches of equal size.

    An epoch is `num_examples` consecutive positions of the stream, and contains every example once. A batch may begin
    in one epoch and end in the next.

    Raises:
        InputError: a size is below 1, the batch is larger than the data set, or the seed is out of 0..2**63-1.
    """

    num_examples: Count
    batch_size: Count
    seed: Seed

    first_row = 0
    """The number that is added to a row before the random numbers of its example are drawn."""

    def __post_init__(self) -> None:
        check_values(self)
        if self.batch_size > self.num_examples:
            raise InputError(
                f"batch size {self.batch_size}: the batch is larger than the data set of "
                f"{counted(self.num_examples, 'example')}; use at most {self.num_examples}"
            )

    @property
    def num_slots(self) -> int:
        """The number of slots of a batch's arrays, with padding: the length of `rows(step)`."""
        return self.batch_size

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
        """Return the epoch of each row of `rows(step)`, int64[batch_size]."""
        return self.epoch_indices(step)

    def epoch_indices(self, step: int) -> np.ndarray:
        """Return the number of complete epochs before each row of `rows(step)`, int64[batch_size]."""
        return positions(step, self.batch_size) // self.num_examples

    def first_epoch(self, step: int) -> int:
        """Return the epoch in which the batch begins."""
        return step * self.batch_size // self.num_examples


@dataclass(frozen=True)
class EvalOrder:
    """The evaluation order: every row once, in the order of the table. The last batch is padded with -1.

    A batch may be larger than the data set. Raises: InputError if a size is below 1.
    """

    num_examples: Count
    batch_size: Count

    seed = 0
    """A constant, because evaluation has no randomness."""
    first_row = 0

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def num_batches(self) -> int:
        """ceil(N / B)."""
        return -(-self.num_examples // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the global batch, int64[batch_size]; -1 for padding."""
        rows = positions(step, self.batch_size)
        return np.where(rows < self.num_examples, rows, -1)

    def epochs(self, step: int) -> np.ndarray:
        return np.zeros(self.batch_size, np.int64)

    def epoch_indices(self, step: int) -> np.ndarray:
        return np.zeros(self.batch_size, np.int64)

    def first_epoch(self, step: int) -> int:
        return 0


Order = SampleOrder | EvalOrder


@lru_cache(maxsize=4)
def permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Return a random permutation of the rows for one epoch: int64[num_examples], read-only.

    The rows are sorted by the raw words of Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
    2011), so the result is the same with every release of NumPy. The result of `Generator.permutation` may change with
    a release. The cache holds four epochs: the two that a batch can span, for each of two threads, one of which reads
    ahead.
    """
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_examples)
    rows = np.argsort(words, kind="stable")
    rows.flags.writeable = False
    return rows


def unlabelled_seed(seed: int) -> int:
    """Return the seed of the second source of a run, for an order, crops and augmentations of its own."""
    return int(np.random.Philox(key=np.array([seed, _UNLABELLED_KEY], np.uint64)).random_raw()) >> 1


def positions(step: int, batch_size: int) -> np.ndarray:
    """Return the positions of a batch in the stream of all examples, int64[batch_size]."""
    if step < 0:
        raise InputError(f"step {step}: the first step is 0")
    return step * batch_size + np.arange(batch_size, dtype=np.int64)
