"""A training order in which all classes appear equally often, however many examples they have."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxddp.core.wording import counted
from jaxddp.data.order import SampleOrder, permutation, positions


@dataclass(frozen=True, eq=False)
class ClassRows:
    """The rows of each class that has examples, int64[n] each, ascending."""

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
    """An order in which an epoch of N positions holds each of K classes N / K times (rounded up or down), shuffled.

    Each class is a stream of permutations of its examples, so every example appears before any appears again. A
    batch depends on (labels, batch size, seed, step) alone. Classes without examples are ignored.
    """

    classes: ClassRows

    @classmethod
    def of(cls, labels: np.ndarray, batch_size: int, seed: int) -> "BalancedOrder":
        """Make an order from the labels int[N] of all examples. Raises: see `SampleOrder`."""
        return cls(len(labels), batch_size, seed, ClassRows.of(labels))

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the global batch, int64[batch_size]."""
        return self._of_stretches(step, 0)

    def epochs(self, step: int) -> np.ndarray:
        """Return how often each of `rows(step)` has appeared before, int64[batch_size]; augmentation depends on it."""
        return self._of_stretches(step, 1)

    def _of_stretches(self, step: int, column: int) -> np.ndarray:
        stretches, places = np.divmod(positions(step, self.batch_size), self.num_examples)
        values = np.empty_like(places)
        for number in np.unique(stretches):
            inside = stretches == number
            values[inside] = _stretch(self.classes, self.num_examples, self.seed, int(number))[column][places[inside]]
        return values


@lru_cache(maxsize=4)
def _stretch(classes: ClassRows, num_examples: int, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, how often each has appeared before), int64[num_examples] each, of one epoch's stretch.

    The stream of all positions cycles through the classes, and the positions of a stretch are then permuted. So the
    classes that appear once more than others change from stretch to stretch.
    """
    count, begin = len(classes.of_class), number * num_examples
    turns = (begin + permutation(num_examples, seed, number)) % count
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
    """Return the permutations of a class's examples in its rounds `first` to `last`, int64[rounds, size].

    They are made of Philox's raw words, as in `permutation`. Each class has its own stream, read from round `first` on.
    """
    block, spare = divmod(first * size, 4)
    # The third word of the counter is not 0. In `permutation` it is always 0, so no random words are used twice.
    words = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=[block, 0, place + 1, 0])
    drawn = words.random_raw(spare + (last - first + 1) * size)[spare:]
    return np.argsort(drawn.reshape(-1, size), axis=1, kind="stable")
