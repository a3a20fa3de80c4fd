"""The order of the examples of all processes, if each process has data of its own (`data.placement=local`).

Process h has n_h examples, and N is their sum. An epoch is N consecutive positions of the stream, as in `SampleOrder`.
Each position belongs to one process, by an interleaving that is the same in all epochs: the j-th example of process h
has the key (2j + 1) / (2 n_h), and the positions follow the keys. So process h has about B * n_h / N examples of each
batch. Its j-th example of an epoch is element j of a permutation of its own rows.

The arrays of a batch have the same number of slots for each process, because the shapes of a compiled step are static.
This number is the largest number of examples that any batch takes from any process. The other slots are padding.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxddp.data.order import EvalOrder, SampleOrder, permutation

# The second word of Philox's key in `_seed_of_host`, without the number of the process. It is larger than any epoch.
_HOST_KEY = 0x686F7374 << 32


@dataclass(frozen=True)
class UnitedOrder(SampleOrder):
    """The training order over the union of the examples of all processes. A batch depends only on its fields and step.

    Row r of process h is row n_0 + ... + n_(h-1) + r of the union.

    Attributes:
        sizes: the number of examples of each process.
        slots: the number of slots of each process in a batch, at least the largest `most_in_batch`.
    """

    sizes: tuple[int, ...]
    slots: int

    @classmethod
    def of(cls, sizes: Sequence[int], batch_size: int, seed: int, slots: int) -> "UnitedOrder":
        """Create an order from the numbers of examples of the processes. Raises: see `SampleOrder`."""
        return cls(sum(sizes), batch_size, seed, tuple(sizes), slots)

    @property
    def num_slots(self) -> int:
        return self.slots * len(self.sizes)

    def of_host(self, host: int) -> "HostOrder":
        """Return the order of the examples of one process."""
        return HostOrder(self.sizes[host], self.slots, self.seed, self, host)

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the slots in the union, int64[num_slots], by process; -1 for padding."""
        hosts = [self.of_host(host) for host in range(len(self.sizes))]
        return np.concatenate([np.where(host.mask(step) > 0, host.rows(step) + host.first_row, -1) for host in hosts])

    def epochs(self, step: int) -> np.ndarray:
        """Return the epoch of each slot of `rows(step)`, int64[num_slots]."""
        return np.concatenate([self.of_host(host).epochs(step) for host in range(len(self.sizes))])

    def epoch_indices(self, step: int) -> np.ndarray:
        return self.epochs(step)


@dataclass(frozen=True)
class HostOrder(SampleOrder):
    """The part of a `UnitedOrder` for one process, as an order of its own rows.

    The examples come first. Each further slot repeats one of them, or the next example of the process if this batch
    takes none from it. So batch norm sees real images only. `mask` tells examples from repeated ones.

    Attributes:
        num_examples: the number of examples of the process.
        batch_size: the number of slots of the process.
        seed: the seed of the run, from which random crops are drawn.
    """

    united: UnitedOrder
    host: int

    def __post_init__(self) -> None:
        """Check nothing: a batch may have more slots than the process has examples."""

    @property
    def first_row(self) -> int:
        """The row in the union of the first example of the process."""
        return sum(self.united.sizes[: self.host])

    def count(self, step: int) -> int:
        """Return the number of examples of a batch that are of this process."""
        first, end = self._bounds(step)
        return end - first

    def mask(self, step: int) -> np.ndarray:
        """Return 1 for each slot with an example, and 0 for padding: float32[batch_size]."""
        return (np.arange(self.batch_size) < self.count(step)).astype(np.float32)

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the slots in the table of the process, int64[batch_size]."""
        epochs, places = np.divmod(self._turns(step), self.num_examples)
        rows, seed = np.empty_like(places), _seed_of_host(self.seed, self.host)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            rows[inside] = permutation(self.num_examples, seed, int(epoch))[places[inside]]
        return rows

    def epoch_indices(self, step: int) -> np.ndarray:
        return self._turns(step) // self.num_examples

    def first_epoch(self, step: int) -> int:
        return self.united.first_epoch(step)

    def _turns(self, step: int) -> np.ndarray:
        """Return the place of each slot in the stream of the examples of this process, int64[batch_size]."""
        first, end = self._bounds(step)
        return first + np.arange(self.batch_size, dtype=np.int64) % max(end - first, 1)

    def _bounds(self, step: int) -> tuple[int, int]:
        """Return the places, in the stream of this process, of the first example of a batch and of the next batch."""
        size = self.united.batch_size
        return self._before(step * size), self._before((step + 1) * size)

    def _before(self, position: int) -> int:
        """Return the number of examples of this process before a position of the stream of all processes."""
        epoch, place = divmod(position, self.united.num_examples)
        return epoch * self.num_examples + int(np.searchsorted(places_of_host(self.united.sizes, self.host), place))


@dataclass(frozen=True)
class HostEvalOrder(EvalOrder):
    """The evaluation order of one process: its rows, and then batches of padding until all processes are done.

    Attributes:
        batches: the number of batches, the same on all processes.
    """

    batches: int

    @property
    def num_batches(self) -> int:
        return self.batches


@lru_cache(maxsize=16)
def places_of_host(sizes: tuple[int, ...], host: int) -> np.ndarray:
    """Return the places in an epoch of the examples of a process: int64[n_h], ascending, read-only.

    The comparison of keys is exact, in integers. Of equal keys the key of the lower process comes first.
    """
    count = sizes[host]
    keys = 2 * np.arange(count, dtype=np.int64) + 1
    places = np.arange(count, dtype=np.int64)
    others = Counter((size, other > host) for other, size in enumerate(sizes) if other != host)
    for (size, is_later), hosts in others.items():
        # Example m of the other process comes first if (2m + 1) * count is below keys * size, or equal to it if the
        # process is earlier.
        places += hosts * (((keys * size - is_later) // count + 1) // 2)
    places.flags.writeable = False
    return places


def most_in_batch(sizes: tuple[int, ...], host: int, batch_size: int) -> int:
    """Return the largest number of examples of a process among any `batch_size` consecutive positions."""
    places = places_of_host(sizes, host)
    two_epochs = np.concatenate([places, places + sum(sizes)])
    return int((np.searchsorted(two_epochs, places + batch_size) - np.arange(len(places))).max())


def _seed_of_host(seed: int, host: int) -> int:
    """Return the seed of the permutations of a process, so that processes of equal sizes have different ones."""
    return int(np.random.Philox(key=np.array([seed, _HOST_KEY + host], np.uint64)).random_raw()) >> 1
