"""How a global batch is divided: into shares, one a device, and each of these into microbatches."""

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jaxddp.config import Config

MOST_MICROBATCHES = 65536


@dataclass(frozen=True)
class Division:
    """A batch in microbatches of equal size.

    Attributes:
        batch_size: global.
        shares: equal parts that the mean is taken over.
        accumulate: microbatches of each share.
        together: examples that belong to one microbatch, a pair or a ghost batch; each holds a multiple of so many.
    """

    batch_size: int
    shares: int
    accumulate: int = 1
    together: int = 1

    @classmethod
    def of(cls, config: Config, shares: int) -> "Division":
        """What a config says."""
        augment, group = config.data.augment, config.model.batch_statistics.group or 1
        pair = 2 if augment.mixup or augment.cutmix else 1
        return cls(config.train.batch_size, shares, config.train.accumulate, math.lcm(pair, group))

    @property
    def is_even(self) -> bool:
        """Whether all microbatches of all shares are equal, and none parts what belongs together."""
        return self.batch_size > 0 and self.batch_size % self._unit == 0

    @property
    def microbatch(self) -> int:
        """Examples that a device computes at once."""
        return self.batch_size // (self.shares * self.accumulate)

    def finer(self) -> Iterator["Division"]:
        """The same batch in more microbatches, from few to many."""
        most = min(self.batch_size // (self.shares * self.together), MOST_MICROBATCHES)
        for accumulate in range(self.accumulate + 1, most + 1):
            if (finer := replace(self, accumulate=accumulate)).is_even:
                yield finer

    @property
    def least(self) -> "Division":
        """The smallest batch in as many microbatches."""
        return replace(self, batch_size=self._unit)

    def largest(self, does: Callable[["Division"], bool]) -> "Division | None":
        """The largest batch below this one that does, in as many microbatches; what does, so does any smaller."""
        sizes = range(self._unit, self.batch_size, self._unit)
        found = bisect.bisect(sizes, False, key=lambda size: not does(replace(self, batch_size=size)))
        return replace(self, batch_size=sizes[found - 1]) if found else None

    @property
    def _unit(self) -> int:
        return self.shares * self.accumulate * self.together
