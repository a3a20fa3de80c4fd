"""A training order in which all classes appear equally often, even if they have different numbers of examples."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxddp.core.wording import counted
from jaxddp.data.order import SampleOrder, permutation, positions


@dataclass(frozen=True, eq=False)
class ClassRows:
    """The rows of each class with examples: int64[n] for each class, ascending."""

    of_class: tuple[np.ndarray, ...]

    def __repr__(self) -> str:
        return f"ClassRows({counted(sum(map(len, self.of_class)), 'row')} of {counted(len(self.of_class), 'class')})"

    @classmethod
    def of(cls, labels: np.ndarray) -> "ClassRows":
        """Group the rows of labels int[N], 0 or more, by class."""
        by_class = np.argsort(labels, kind="stable")
        counts = np.bincount(labels)
        return cls(tuple(np.split(by_class, np.cumsum(counts[counts > 0])[:-1])))


@dataclass(frozen=True)
class BalancedOrder(SampleOrder):
    """A shuffled order in which each of K classes has N / K (rounded up or down) of the N positions of an epoch.

    The examples of a class appear in rounds: each round is a new permutation of all examples of the class. A batch
    depends only on (labels, batch size, seed, step). Classes without examples are ignored.
    """

    classes: ClassRows

    @classmethod
    def of(cls, labels: np.ndarray, batch_size: int, seed: int) -> "BalancedOrder":
        """Create an order from the labels, int[N], of all examples. Raises: see `SampleOrder`."""
        return cls(len(labels), batch_size, seed, ClassRows.of(labels))

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the global batch, int64[batch_size]."""
        return self._of_epochs(step, 0)

    def epochs(self, step: int) -> np.ndarray:
        """Return the number of earlier appearances of each row of `rows(step)`, int64[batch_size]."""
        return self._of_epochs(step, 1)

    def _of_epochs(self, step: int, column: int) -> np.ndarray:
        epoch_indices, places = np.divmod(positions(step, self.batch_size), self.num_examples)
        values = np.empty_like(places)
        for epoch in np.unique(epoch_indices):
            inside = epoch_indices == epoch
            values[inside] = _epoch_rows(self.classes, self.num_examples, self.seed, int(epoch))[column][places[inside]]
        return values


@lru_cache(maxsize=4)
def _epoch_rows(classes: ClassRows, num_examples: int, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, number of earlier appearances of each row), int64[num_examples] each, of epoch `epoch`.

    Before shuffling, consecutive positions of the stream have consecutive classes, in a cycle. So the classes that
    appear once more than others change from epoch to epoch. Then the positions of the epoch are permuted.
    """
    count, begin = len(classes.of_class), epoch * num_examples
    turns = (begin + permutation(num_examples, seed, epoch)) % count
    by_class = np.argsort(turns, kind="stable")
    bounds = np.searchsorted(turns[by_class], np.arange(count + 1))
    rows, before = np.empty((2, num_examples), np.int64)
    for place, class_rows in enumerate(classes.of_class):
        positions_of_class = by_class[bounds[place] : bounds[place + 1]]
        first = (begin + count - 1 - place) // count
        rounds, within = np.divmod(first + np.arange(len(positions_of_class)), len(class_rows))
        if len(positions_of_class):
            orders = _class_orders(len(class_rows), seed, place, int(rounds[0]), int(rounds[-1]))
            rows[positions_of_class] = class_rows[orders[rounds - rounds[0], within]]
            before[positions_of_class] = rounds
    return rows, before


def _class_orders(size: int, seed: int, place: int, first: int, last: int) -> np.ndarray:
    """Return the permutations of the examples of a class in rounds `first` to `last`, int64[rounds, size].

    As in `permutation`, the examples are sorted by raw words of Philox. Each class has its own stream of words.
    """
    block, spare = divmod(first * size, 4)
    # The third word of the counter is above 0 here and 0 in `permutation`, so the random words differ.
    words = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=[block, 0, place + 1, 0])
    drawn = words.random_raw(spare + (last - first + 1) * size)[spare:]
    return np.argsort(drawn.reshape(-1, size), axis=1, kind="stable")
