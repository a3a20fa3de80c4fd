"""Training images that grow during a run. Steps with small images need less computation.

Touvron et al. 2019, "Fixing the train-test resolution discrepancy" (arXiv:1906.06423), train on smaller images than
they evaluate on. As for FFCV's ResNets (github.com/libffcv/ffcv-imagenet, `get_resolution`: 160 to 192 pixels between
epochs 65 and 76 of 88), the side grows linearly, by default in multiples of 32 pixels.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key


@dataclass(frozen=True)
class Growth:
    """The side of the training images, in pixels, as a function of the step.

    Until `start` examples were used, the side is `first`. After `end` examples, it is `last`. In between, it is
    interpolated linearly and rounded to the nearest multiple of `by` (halves up).
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
        """Return the growth to a side of `last` pixels from a config; None if images do not grow.

        Raises:
            InputError: `data.grow_from` is not below `last`, `data.grow_by` is larger than the difference, or
                `data.grow_start` is after `data.grow_end`.
        """
        if (first := data.grow_from) is None:
            return None
        if first >= last:
            raise InputError(
                Key("data.grow_from", first),
                f": images grow to {last} pixels",
                advice=("give a smaller side, or leave ", Key("data.grow_from"), " out"),
            )
        if data.grow_by > last - first:
            raise InputError(
                Key("data.grow_by", data.grow_by),
                f": the side grows by only {last - first} pixels, from {first} to {last}",
                advice=f"give at most {last - first}",
            )
        sizes = {"num_examples": num_examples, "batch_size": batch_size, "total_steps": total_steps}
        start, end = (duration.examples(**sizes) for duration in (data.grow_start, data.grow_end))
        if start > end:
            raise InputError(
                Key("data.grow_start", data.grow_start, f'"{data.grow_start}"'),
                " comes after ",
                Key("data.grow_end", data.grow_end, f'"{data.grow_end}"'),
                advice="give an earlier start",
            )
        return cls(first, last, data.grow_by, start, end, batch_size)

    def side(self, step: int) -> int:
        """Return the side of the images of a step; the first step is 0."""
        examples = Fraction(step * self.batch_size)
        if examples >= self.end:
            return self.last
        if examples <= self.start:
            return self.first
        line = self.first + (self.last - self.first) * (examples - self.start) / (self.end - self.start)
        nearest = math.floor(line / self.by + Fraction(1, 2)) * self.by
        return min(max(nearest, self.first), self.last)

    def changes(self, total_steps: int) -> list[int]:
        """Return the steps, among `total_steps` steps, at which the side of the images changes."""
        return [steps.start for steps, _ in self.segments(range(total_steps))][1:]

    def segments(self, steps: range) -> Iterator[tuple[range, int]]:
        """Divide a range of steps at the changes of the side; yield (steps, side) for each part."""
        while steps:
            side = self.side(steps[0])
            same = bisect_right(steps, side, key=self.side)
            yield steps[:same], side
            steps = steps[same:]
