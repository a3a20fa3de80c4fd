"""`Division`: the division of a global batch into one share for each device, and of each share into microbatches."""

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jaxddp.config import Config

MOST_MICROBATCHES = 65536


@dataclass(frozen=True)
class Division:
    """The division of a batch into microbatches of equal size.

    Attributes:
        batch_size: the size of the global batch.
        shares: the number of equal shares of the batch over which the gradient is averaged.
        accumulate: the number of microbatches in each share.
        group_size: the number of examples that must be in one microbatch (a mixed pair or a ghost batch). The
            size of a microbatch is a multiple of this number.
    """

    batch_size: int
    shares: int
    accumulate: int = 1
    group_size: int = 1

    @classmethod
    def of(cls, config: Config, shares: int) -> "Division":
        """Return the division of a config."""
        augment, group = config.data.augment, config.model.batch_statistics.group or 1
        pair = 2 if augment.mixup or augment.cutmix else 1
        return cls(config.train.batch_size, shares, config.train.accumulate, math.lcm(pair, group))

    @property
    def is_even(self) -> bool:
        """Whether all microbatches have the same size, which is a multiple of `group_size`."""
        return self.batch_size > 0 and self.batch_size % self._unit == 0

    @property
    def microbatch(self) -> int:
        """The number of examples in a microbatch."""
        return self.batch_size // (self.shares * self.accumulate)

    def finer_divisions(self) -> Iterator["Division"]:
        """Yield the divisions of the same batch into more microbatches, in ascending order."""
        most = min(self.batch_size // (self.shares * self.group_size), MOST_MICROBATCHES)
        for accumulate in range(self.accumulate + 1, most + 1):
            if (division := replace(self, accumulate=accumulate)).is_even:
                yield division

    @property
    def smallest(self) -> "Division":
        """The division of the smallest possible batch into the same number of microbatches."""
        return replace(self, batch_size=self._unit)

    def largest_that_fits(self, fits: Callable[["Division"], bool]) -> "Division | None":
        """Return the division of the largest smaller batch for which `fits` returns True; None if there is none.

        The number of microbatches stays the same.

        Args:
            fits: a function of a division. If it returns True for a batch, it must return True for every smaller batch.
        """
        sizes = range(self._unit, self.batch_size, self._unit)
        count = bisect.bisect(sizes, False, key=lambda size: not fits(replace(self, batch_size=size)))
        return replace(self, batch_size=sizes[count - 1]) if count else None

    @property
    def unit_of_slice(self) -> int:
        """The number of which the size of a device's slice is a multiple, also if the slices are not equal."""
        return self.accumulate * self.group_size

    @property
    def _unit(self) -> int:
        return self.shares * self.unit_of_slice
