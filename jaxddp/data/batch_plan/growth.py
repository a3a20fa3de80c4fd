"""Images that grow while a network is trained on them: small ones cost less, and teach it most of what it learns.

Touvron et al. 2019, "Fixing the train-test resolution discrepancy" (arXiv:1906.06423) have networks trained on smaller
images than they are measured on. That the side grows linearly, in multiples of 32, is from FFCV's ResNets
(github.com/libffcv/ffcv-imagenet, `get_resolution`: 160 to 192 pixels between epochs 65 and 76 of 88).
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key


@dataclass(frozen=True)
class Growth:
    """The side of a run's training images, in pixels, as a function of the step alone.

    It is `first` up to `start` and `last` from `end` on, which are counted in examples before the step. Between them it
    is the multiple of `by` that is nearest to a straight line (of two that are as near, the larger one), within both.
    """

    first: int
    last: int
    by: int
    start: Fraction
    end: Fraction
    batch_size: int

    @classmethod
    def of(
        cls, data: DataConfig, last: int, *, num_examples: int, batch_size: int, total_steps: int
    ) -> "Growth | None":
        """That of a config, up to a side of `last` pixels; None where nothing grows.

        Raises:
            InputError: the images would shrink, have no size to take on between, or grow until before they begin to.
        """
        if (first := data.grow_from) is None:
            return None
        if first >= last:
            raise InputError(
                Key("data.grow_from", first),
                f": images grow to {last} pixels",
                advice=("give fewer, or leave ", Key("data.grow_from"), " out"),
            )
        if data.grow_by > last - first:
            raise InputError(
                Key("data.grow_by", data.grow_by),
                f": from {first} pixels to {last} are only {last - first}",
                advice="give at most that",
            )
        sizes = {"num_examples": num_examples, "batch_size": batch_size, "total_steps": total_steps}
        start, end = (duration.examples(**sizes) for duration in (data.grow_start, data.grow_end))
        if start > end:
            raise InputError(
                Key("data.grow_start", data.grow_start, f'"{data.grow_start}"'),
                " comes after ",
                Key("data.grow_end", data.grow_end, f'"{data.grow_end}"'),
                advice="give an earlier one",
            )
        return cls(first, last, data.grow_by, start, end, batch_size)

    def side(self, step: int) -> int:
        """Of the images of a step; 0 is the first."""
        seen = Fraction(step * self.batch_size)
        if seen >= self.end:
            return self.last
        if seen <= self.start:
            return self.first
        line = self.first + (self.last - self.first) * (seen - self.start) / (self.end - self.start)
        nearest = math.floor(line / self.by + Fraction(1, 2)) * self.by
        return min(max(nearest, self.first), self.last)

    def changes(self, total_steps: int) -> list[int]:
        """The steps of a run whose images have another side than those of the step before."""
        return [steps.start for steps, _ in self.segments(range(total_steps))][1:]

    def segments(self, steps: range) -> Iterator[tuple[range, int]]:
        """Cuts steps where the side changes: each stretch of one side, and that side."""
        while steps:
            side = self.side(steps[0])
            same = bisect_right(steps, side, key=self.side)
            yield steps[:same], side
            steps = steps[same:]
