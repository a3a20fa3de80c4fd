"""A training order in which all classes come equally often, however many examples they have."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxddp.core.wording import counted
from jaxddp.data.order import SampleOrder, permutation, positions


@dataclass(frozen=True, eq=False)
class ClassRows:
    """The rows of each class that has any, int64[n] each, ascending."""

    of_class: tuple[np.ndarray, ...]

    def __repr__(self) -> str:
        return f"ClassRows({counted(sum(map(len, self.of_class)), 'row')} of {counted(len(self.of_class), 'class')})"

    @classmethod
    def of(cls, labels: np.ndarray) -> "ClassRows":
        """Of labels int[N], 0 or more."""
        by_class = np.argsort(labels, kind="stable")
        counts = np.bincount(labels)
        return cls(tuple(np.split(by_class, np.cumsum(counts[counts > 0])[:-1])))


@dataclass(frozen=True)
class BalancedOrder(SampleOrder):
    """Each epoch's stretch of N places has every one of K classes N / K times, rounded up or down, in random places.

    Within a class every example appears before any appears again: a class is a stream of permutations of its own. What
    a batch holds follows from (labels, batch size, seed, step) alone. A class without examples has no part.
    """

    classes: ClassRows

    @classmethod
    def of(cls, labels: np.ndarray, batch_size: int, seed: int) -> "BalancedOrder":
        """Of the labels int[N] of all examples. Raises: as `SampleOrder`."""
        return cls(len(labels), batch_size, seed, ClassRows.of(labels))

    def rows(self, step: int) -> np.ndarray:
        """The rows of the global batch, int64[batch_size]."""
        return self._of_stretches(step, 0)

    def epochs(self, step: int) -> np.ndarray:
        """How often each of `rows(step)` has appeared before, int64[batch_size], by which its augmentation differs."""
        return self._of_stretches(step, 1)

    def _of_stretches(self, step: int, column: int) -> np.ndarray:
        stretches, places = np.divmod(positions(step, self.batch_size), self.num_examples)
        found = np.empty_like(places)
        for number in np.unique(stretches):
            here = stretches == number
            found[here] = _stretch(self.classes, self.num_examples, self.seed, int(number))[column][places[here]]
        return found


@lru_cache(maxsize=4)
def _stretch(classes: ClassRows, num_examples: int, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, how often each has appeared before), int64[num_examples] each, of one epoch's stretch.

    The stream of all places goes round the classes, and the places of a stretch are then permuted. So the classes that
    a stretch has once more than others change from one to the next.
    """
    count, begin = len(classes.of_class), number * num_examples
    turns = (begin + permutation(num_examples, seed, number)) % count
    by_class = np.argsort(turns, kind="stable")
    bounds = np.searchsorted(turns[by_class], np.arange(count + 1))
    rows, before = np.empty((2, num_examples), np.int64)
    for place, own in enumerate(classes.of_class):
        here = by_class[bounds[place] : bounds[place + 1]]
        first = (begin + count - 1 - place) // count
        rounds, within = np.divmod(first + np.arange(len(here)), len(own))
        if len(here):
            orders = _class_orders(len(own), seed, place, int(rounds[0]), int(rounds[-1]))
            rows[here] = own[orders[rounds - rounds[0], within]]
            before[here] = rounds
    return rows, before


def _class_orders(size: int, seed: int, place: int, first: int, last: int) -> np.ndarray:
    """The permutations of a class's examples in its rounds `first` to `last`, int64[rounds, size].

    As in `permutation`, of Philox's raw words, here of one stream for each class, which is entered at the first round.
    """
    block, spare = divmod(first * size, 4)
    # A third word of the counter that `permutation` never reaches.
    words = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=[block, 0, place + 1, 0])
    drawn = words.random_raw(spare + (last - first + 1) * size)[spare:]
    return np.argsort(drawn.reshape(-1, size), axis=1, kind="stable")
