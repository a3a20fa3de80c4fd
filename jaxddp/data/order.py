"""The examples of each global batch, as a function of the step.

The global batch of step t depends only on (num_examples, batch_size, seed, t). So a run resumes without a saved
position in the data, and the global batches are the same for any number of hosts.
"""

from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from jaxddp.config.values import check_values
from jaxddp.core.errors import InputError, Key, counted
from jaxddp.core.peers import Peers
from jaxddp.core.ranges import Count, Seed
from jaxddp.data.batch import Batch

# The second word of Philox's key in `unlabelled_seed`. The second word in `permutation` is the epoch, which is always
# smaller, so the two functions never use the same key.
_UNLABELLED_KEY = 0x756E6C6162656C
# The second word of Philox's key in `_seed_of_host`, without the number of the process. It is larger than any epoch.
_HOST_KEY = 0x686F7374 << 32


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

    @classmethod
    def of_process(cls, peers: Peers) -> "Shard":
        """Return this process's part of batches that are divided equally."""
        return cls(peers.process_index, peers.process_count)

    def of(self, values: np.ndarray, padding: int = -1) -> np.ndarray:
        """Return this part of the values of a global batch; the empty places of slots hold `padding`.

        Raises: InputError if there is no such part, or the batch does not divide into such parts.
        """
        if not 0 <= self.index < self.count:
            raise InputError(f"part {self.index} of a batch of {self.count} parts: use 0..{self.count - 1}")
        size, unit = len(values), sum(self._sizes)
        if size % unit:
            parts = f"slices of {self.sizes}" if self.sizes else f"{self.count} equal parts"
            use = " or ".join(str(near) for near in (size - size % unit, size - size % unit + unit) if near)
            raise InputError(f"batch size {size} does not divide into {parts}; use {use}")
        if self.microbatches > 1:
            values = values.reshape(self.microbatches, self.shares, -1).swapaxes(0, 1).reshape(-1)
        if not self.sizes:
            return values.reshape(self.count, size // self.count, *values.shape[1:])[self.index]
        slots = np.split(values, size // unit * np.cumsum(self.sizes)[:-1])[self._own]
        width = self.slots(size) // len(slots)
        return np.concatenate([np.pad(slot, (0, width - len(slot)), constant_values=padding) for slot in slots])

    def slots(self, batch_size: int) -> int:
        """Return the length of the result of `of` for a batch of this size, with padding."""
        return len(self._sizes[self._own]) * max(self._sizes) * batch_size // sum(self._sizes)

    def examples(self, batch_size: int) -> int:
        """Return the number of examples of this part of a batch, without the padding of slots."""
        return sum(self._sizes[self._own]) * batch_size // sum(self._sizes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The sizes of all slices; of equal ones, there is one for each part."""
        return self.sizes or (1,) * self.count

    @property
    def _own(self) -> slice:
        """The slices of this part, among all."""
        slices = len(self._sizes) // self.count
        return slice(self.index * slices, (self.index + 1) * slices)


WHOLE = Shard()
"""The whole global batch."""


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
            fault = f" is larger than the data set of {counted(self.num_examples, 'example')}"
            raise InputError(Key("train.batch_size", self.batch_size), fault, advice=f"use at most {self.num_examples}")

    @property
    def num_slots(self) -> int:
        """The number of slots of a batch's arrays, with padding: the length of `rows(step)`."""
        return self.batch_size

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the global batch, int64[batch_size]."""
        stream = positions(step, self.batch_size)
        return _of_epochs(stream, self.num_examples, partial(permutation, self.num_examples, self.seed))

    def epochs(self, step: int) -> np.ndarray:
        """Return the epoch of each row of `rows(step)`, int64[batch_size]."""
        return positions(step, self.batch_size) // self.num_examples

    def is_of_first_epoch(self, step: int) -> np.ndarray:
        """Return whether each row of `rows(step)` is of the epoch in which the batch begins, bool[batch_size]."""
        return positions(step, self.batch_size) // self.num_examples == step * self.batch_size // self.num_examples


@dataclass(frozen=True)
class EvalOrder:
    """The evaluation order: every row once, in the order of the table. The last batch is padded with -1.

    A batch may be larger than the data set. Raises: InputError if a size is below 1.

    Attributes:
        batches: the number of batches, the last of them without examples; None for ceil(N / B). Processes with data of
            their own have equally many.
    """

    num_examples: Count
    batch_size: Count
    batches: Count | None = None

    seed = 0
    """A constant, because evaluation has no randomness."""
    first_row = 0

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def num_batches(self) -> int:
        return self.batches or -(-self.num_examples // self.batch_size)

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the global batch, int64[batch_size]; -1 for padding."""
        rows = positions(step, self.batch_size)
        return np.where(rows < self.num_examples, rows, -1)

    def epochs(self, step: int) -> np.ndarray:
        return np.zeros(self.batch_size, np.int64)

    def is_of_first_epoch(self, step: int) -> np.ndarray:
        return np.ones(self.batch_size, bool)


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


def _of_epochs(stream: np.ndarray, num_examples: int, of_epoch: Callable[[int], np.ndarray]) -> np.ndarray:
    """Return the values, [..., n], at n positions of a stream of epochs; `of_epoch` returns those of an epoch."""
    epochs, places = np.divmod(stream, num_examples)
    existing = np.unique(epochs).tolist()
    return np.select([epochs == epoch for epoch in existing], [of_epoch(epoch)[..., places] for epoch in existing])


def positions(step: int, batch_size: int) -> np.ndarray:
    """Return the positions of a batch in the stream of all examples, int64[batch_size]."""
    if step < 0:
        raise InputError(f"step {step}: the first step is 0")
    return step * batch_size + np.arange(batch_size, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class ClassRows:
    """The rows of each class with examples: int64[n] for each class, ascending."""

    of_class: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class BalancedOrder(SampleOrder):
    """A shuffled order in which each of K classes has N / K (rounded up or down) of the N positions of an epoch.

    The examples of a class appear in rounds: each round is a new permutation of all examples of the class. A batch
    depends only on (labels, batch size, seed, step). Classes without examples are ignored.
    """

    classes: ClassRows = field(repr=False)

    @classmethod
    def of(cls, labels: np.ndarray, batch_size: int, seed: int) -> "BalancedOrder":
        """Create an order from the labels of all examples, int[N], 0 or more. Raises: see `SampleOrder`."""
        by_class, counts = np.argsort(labels, kind="stable"), np.bincount(labels)
        rows = tuple(np.split(by_class, np.cumsum(counts[counts > 0])[:-1]))
        return cls(len(labels), batch_size, seed, ClassRows(rows))

    def rows(self, step: int) -> np.ndarray:
        return self._columns(step)[0]

    def epochs(self, step: int) -> np.ndarray:
        """Return the number of earlier appearances of each row of `rows(step)`, int64[batch_size]."""
        return self._columns(step)[1]

    def _columns(self, step: int) -> np.ndarray:
        stream = positions(step, self.batch_size)
        return _of_epochs(stream, self.num_examples, partial(_epoch_rows, self.classes, self.num_examples, self.seed))


@lru_cache(maxsize=4)
def _epoch_rows(classes: ClassRows, num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Return rows and the number of earlier appearances of each row, int64[2, num_examples], of epoch `epoch`.

    Before shuffling, consecutive positions of the stream have consecutive classes, in a cycle. So the classes that
    appear once more than others change from epoch to epoch. Then the positions of the epoch are permuted.
    """
    count, begin = len(classes.of_class), epoch * num_examples
    turns = (begin + permutation(num_examples, seed, epoch)) % count
    by_class = np.argsort(turns, kind="stable")
    bounds = np.searchsorted(turns[by_class], np.arange(count + 1))
    rows, before = columns_of_epoch = np.empty((2, num_examples), np.int64)
    for place, class_rows in enumerate(classes.of_class):
        positions_of_class = by_class[bounds[place] : bounds[place + 1]]
        first = (begin + count - 1 - place) // count
        rounds, within = np.divmod(first + np.arange(len(positions_of_class)), len(class_rows))
        if len(positions_of_class):
            orders = _class_orders(len(class_rows), seed, place, int(rounds[0]), int(rounds[-1]))
            rows[positions_of_class] = class_rows[orders[rounds - rounds[0], within]]
            before[positions_of_class] = rounds
    return columns_of_epoch


def _class_orders(size: int, seed: int, place: int, first: int, last: int) -> np.ndarray:
    """Return the permutations of the examples of a class in rounds `first` to `last`, int64[rounds, size].

    As in `permutation`, the examples are sorted by raw words of Philox. Each class has its own stream of words.
    """
    block, spare = divmod(first * size, 4)
    # The third word of the counter is above 0 here and 0 in `permutation`, so the random words differ.
    words = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=[block, 0, place + 1, 0])
    drawn = words.random_raw(spare + (last - first + 1) * size)[spare:]
    return np.argsort(drawn.reshape(-1, size), axis=1, kind="stable")


@dataclass(frozen=True)
class RepeatedOrder(SampleOrder):
    """An order of batches with m copies of B / m examples (Hoffer et al. 2020, arXiv:1901.09335).

    The examples of a batch are those of a batch of the size B / m in another order. First come all examples once, then
    all examples again, and so on. So mixing pairs two different examples if B / m is above 1, and on m or more devices
    no microbatch of a device has two copies.

    An epoch is still N consecutive positions, as in DeiT. It has m copies of N / m examples, and m epochs have m
    copies of each example. The copies have consecutive values of `epochs`, so their random numbers differ.

    Attributes:
        base: the order of the examples. It gets the seed of this order.
        repeats: m.
    """

    base: SampleOrder
    repeats: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "base", replace(self.base, seed=self.seed))

    @classmethod
    def of(cls, order: SampleOrder, repeats: int) -> "RepeatedOrder":
        """Return the order whose batches have `repeats` copies of the batches of `order`."""
        return cls(order.num_examples, order.batch_size * repeats, order.seed, order, repeats)

    def rows(self, step: int) -> np.ndarray:
        return np.tile(self.base.rows(step), self.repeats)

    def epochs(self, step: int) -> np.ndarray:
        """Return the number of earlier appearances of each row of `rows(step)`, int64[batch_size]."""
        copies = np.arange(self.repeats, dtype=np.int64)[:, None]
        return (self.repeats * self.base.epochs(step) + copies).reshape(-1)


def check_repeats(repeats: int, batch_size: int) -> None:
    """Raise `InputError` if a batch does not have the same number of copies of each example."""
    if batch_size % repeats:
        lower = batch_size - batch_size % repeats
        advice = f"a batch of {' or '.join(str(size) for size in (lower, lower + repeats) if size)} would do"
        both = Key("data.repeats", repeats), " does not divide ", Key("train.batch_size", batch_size)
        raise InputError(*both, advice=advice)


@dataclass(frozen=True)
class UnitedOrder(SampleOrder):
    """The training order over the union of the examples of all processes. A batch depends only on its fields and step.

    Process h has n_h examples, and N is their sum. An epoch is N consecutive positions of the stream, as in
    `SampleOrder`. Each position belongs to one process, by an interleaving that is the same in all epochs: the j-th
    example of process h has the key (2j + 1) / (2 n_h), and the positions follow the keys. So process h has about
    B * n_h / N examples of each batch. Its j-th example of an epoch is element j of a permutation of its own rows.

    The arrays of a batch have the same number of slots for each process, because the shapes of a compiled step are
    static. This number is the largest number of examples that any batch takes from any process. The other slots are
    padding.

    Row r of process h is row n_0 + ... + n_(h-1) + r of the union.

    Attributes:
        lengths: the number of examples of each process.
        slots: the number of slots of each process in a batch, at least the largest `most_in_batch`.
    """

    lengths: tuple[int, ...]
    slots: int

    @property
    def num_slots(self) -> int:
        return self.slots * len(self.lengths)

    def of_host(self, host: int) -> "HostOrder":
        """Return the order of the examples of one process."""
        return HostOrder(self.lengths[host], self.slots, self.seed, self, host)

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the slots in the union, int64[num_slots], by process; -1 for padding."""
        hosts = [self.of_host(host) for host in range(len(self.lengths))]
        return np.concatenate([np.where(host.mask(step) > 0, host.rows(step) + host.first_row, -1) for host in hosts])

    def epochs(self, step: int) -> np.ndarray:
        """Return the epoch of each slot of `rows(step)`, int64[num_slots]."""
        return np.concatenate([self.of_host(host).epochs(step) for host in range(len(self.lengths))])


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
        return sum(self.united.lengths[: self.host])

    def mask(self, step: int) -> np.ndarray:
        """Return 1 for each slot with an example, and 0 for padding: float32[batch_size]."""
        first, end = self._bounds(step)
        return (np.arange(self.batch_size) < end - first).astype(np.float32)

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the slots in the table of the process, int64[batch_size]."""
        seed = _seed_of_host(self.seed, self.host)
        return _of_epochs(self._turns(step), self.num_examples, partial(permutation, self.num_examples, seed))

    def epochs(self, step: int) -> np.ndarray:
        return self._turns(step) // self.num_examples

    def is_of_first_epoch(self, step: int) -> np.ndarray:
        return self.epochs(step) == step * self.united.batch_size // self.united.num_examples

    def _turns(self, step: int) -> np.ndarray:
        """Return the place of each slot in the stream of the examples of this process, int64[batch_size]."""
        first, end = self._bounds(step)
        return first + np.arange(self.batch_size, dtype=np.int64) % max(end - first, 1)

    def _bounds(self, step: int) -> tuple[int, int]:
        """Return the places, in the stream of this process, of the first example of a batch and of the next batch."""
        epochs, places = np.divmod(np.array([step, step + 1]) * self.united.batch_size, self.united.num_examples)
        own = places_of_host(self.united.lengths, self.host)
        first, end = epochs * self.num_examples + np.searchsorted(own, places)
        return int(first), int(end)


@lru_cache(maxsize=16)
def places_of_host(lengths: tuple[int, ...], host: int) -> np.ndarray:
    """Return the places in an epoch of the examples of a process: int64[n_h], ascending, read-only.

    The comparison of keys is exact, in integers. Of equal keys the key of the lower process comes first.
    """
    count = lengths[host]
    keys = 2 * np.arange(count, dtype=np.int64) + 1
    places = np.arange(count, dtype=np.int64)
    others = Counter((size, other > host) for other, size in enumerate(lengths) if other != host)
    for (size, is_later), hosts in others.items():
        # Example m of the other process comes first if (2m + 1) * count is below keys * size, or equal to it if the
        # process is earlier.
        places += hosts * (((keys * size - is_later) // count + 1) // 2)
    places.flags.writeable = False
    return places


def most_in_batch(lengths: tuple[int, ...], host: int, batch_size: int) -> int:
    """Return the largest number of examples of a process among any `batch_size` consecutive positions."""
    places = places_of_host(lengths, host)
    two_epochs = np.concatenate([places, places + sum(lengths)])
    return int((np.searchsorted(two_epochs, places + batch_size) - np.arange(len(places))).max())


def _seed_of_host(seed: int, host: int) -> int:
    """Return the seed of the permutations of a process, so that processes of equal size have different ones."""
    return int(np.random.Philox(key=np.array([seed, _HOST_KEY + host], np.uint64)).random_raw()) >> 1


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


def columns(examples: Any, order: Order, step: int, shard: Shard = WHOLE) -> Batch:
    """Return one shard of the batch of a step, without images. Padding has 0 as mask, label and row.

    A batch of an `EvalOrder` has no weights.

    Args:
        examples: `jaxddp.data.source.Source`, with an attribute `weights`, float32[N] or None, if they have weights.

    Raises: see `Shard.of`.
    """
    rows = shard.of(order.rows(step))
    real = rows >= 0
    row = np.where(real, rows, 0).astype(np.int32)
    labels, weights = examples.labels, getattr(examples, "weights", None)
    label = np.where(real if labels.ndim == 1 else real[:, None], labels[row], 0)
    return Batch(
        image=None,
        label=label.astype(np.int32 if labels.ndim == 1 else labels.dtype),
        mask=real.astype(np.float32),
        row=row,
        epoch=shard.of(order.epochs(step), padding=0).astype(np.int32),
        weight=None if weights is None or isinstance(order, EvalOrder) else np.where(real, weights[row], 0),
    )


def stacked_columns(examples: Any, order: Order, steps: range, shard: Shard = WHOLE) -> Batch:
    """Return the `columns` of several steps, stacked on axis 1: arrays [B, len(steps)].

    The batch axis remains the first axis, so `Topology.place` shards the result like a batch.
    """
    batches = [columns(examples, order, step, shard) for step in steps]
    return Batch(*(None if parts[0] is None else np.stack(parts, axis=1) for parts in zip(*batches, strict=True)))


def check_order(examples: Sized, order: Order, shard: Shard) -> None:
    """Raise `InputError` if an order does not fit the examples or the shard."""
    if order.num_examples != len(examples):
        count = counted(order.num_examples, "example")
        raise InputError(f"an order of {count}, but the data set has {len(examples)}: make an order for this data set")
    shard.of(order.rows(0))
