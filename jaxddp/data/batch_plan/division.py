"""Divides a global batch into shares, one for each device, and each share into microbatches."""

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
        shares: the number of equal shares of the batch; the mean is taken over them.
        accumulate: the number of microbatches in each share.
        together: the number of examples that must stay in one microbatch (a pair, or a ghost batch). The size of a
            microbatch is a multiple of this number.
    """

    batch_size: int
    shares: int
    accumulate: int = 1
    together: int = 1

    @classmethod
    def of(cls, config: Config, shares: int) -> "Division":
        """Return the division of a config."""
        augment, group = config.data.augment, config.model.batch_statistics.group or 1
        pair = 2 if augment.mixup or augment.cutmix else 1
        return cls(config.train.batch_size, shares, config.train.accumulate, math.lcm(pair, group))

    @property
    def is_even(self) -> bool:
        """Whether all microbatches have the same size, and examples that belong together are in one microbatch."""
        return self.batch_size > 0 and self.batch_size % self._unit == 0

    @property
    def microbatch(self) -> int:
        """The number of examples that a device computes at once."""
        return self.batch_size // (self.shares * self.accumulate)

    def finer(self) -> Iterator["Division"]:
        """Yield divisions of the same batch into more and more microbatches."""
        most = min(self.batch_size // (self.shares * self.together), MOST_MICROBATCHES)
        for accumulate in range(self.accumulate + 1, most + 1):
            if (finer := replace(self, accumulate=accumulate)).is_even:
                yield finer

    @property
    def least(self) -> "Division":
        """The smallest batch with the same number of microbatches."""
        return replace(self, batch_size=self._unit)

    def largest(self, fits: Callable[["Division"], bool]) -> "Division | None":
        """Return the largest smaller batch for which `fits` is true, with the same number of microbatches.

        Args:
            fits: whether a batch fits. If a batch fits, every smaller batch must fit too.
        """
        sizes = range(self._unit, self.batch_size, self._unit)
        count = bisect.bisect(sizes, False, key=lambda size: not fits(replace(self, batch_size=size)))
        return replace(self, batch_size=sizes[count - 1]) if count else None

    @property
    def _unit(self) -> int:
        return self.shares * self.accumulate * self.together
