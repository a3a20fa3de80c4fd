"""`Batch`: the input of the training step; the plan of a run's batches: microbatches, and images that grow."""

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxddp.core.errors import InputError, Key, shaped

if TYPE_CHECKING:
    import numpy as np

    from jaxddp.config import Config, DataConfig


class Batch(NamedTuple):
    """A batch of B examples: a pytree of arrays whose first axis has the length B.

    A process makes its own slice of the global batch as NumPy arrays; `Topology.place` converts them to global arrays.
    `row` and `epoch` identify each appearance of an example. Its random augmentation is a function of (seed, epoch,
    row), so it does not depend on the device.
    """

    image: Any
    """uint8 or uint16 [B, H, W, C], the decoded pixels; the device normalizes them."""
    label: Any
    """int32[B], class indices; other forms of labels are [B, K], see `jaxddp.data.source.LabelForm`."""
    mask: Any
    """float32[B], 1 for an example and 0 for padding."""
    row: Any
    """int32[B], the row of the example in its table; 0 for padding."""
    epoch: Any
    """int32[B], the number of earlier appearances of the example in the run; 0 in evaluation."""
    substituted: Any = None
    """float32[B], 1 if the image is unusable and another example's image replaces it. In a batch that spans two epochs,
    it is 0 for all examples of the second epoch. None if images are never substituted."""
    side: Any = None
    """`jaxddp.augment.geometry.Side`, a static value without arrays: the size to which the device resizes training
    images; None if the images keep their size."""
    weight: Any = None
    """float32[B], the weight of each example in the loss of training; None if all are equal, and in evaluation."""
    unlabelled: Any = None
    """A `Batch` of unlabelled examples (label -1) from a second source; its size is a multiple of B. None without a
    second source. Code that divides a batch must divide `unlabelled` into the same number of parts."""

    def __repr__(self) -> str:
        columns = {name: column for name, column in self._asdict().items() if column is not None}
        fields = (f"{name}={shaped(it) if hasattr(it, 'shape') else repr(it)}" for name, it in columns.items())
        return f"Batch({', '.join(fields)})"


@dataclass(frozen=True)
class PixelFormat:
    """The channels and bits to which every file of a data set is decoded."""

    channels: int = 3
    """1 gray (the luma of RGB, ITU-R BT.601), 3 RGB, 4 RGBA (opaque where the file has no alpha)."""
    bits: int = 8
    """8 or 16. Conversion to 8 bits keeps the upper 8; conversion to 16 repeats the 8 bits, so white stays white."""

    @property
    def dtype(self) -> "np.dtype":
        """The dtype of the pixels: uint8 or uint16."""
        import numpy as np  # The launcher imports this module, and needs no library.

        return np.dtype(np.uint8 if self.bits == 8 else np.uint16)


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
        remat: `train.remat`: the activations of a microbatch that are kept for the backward pass.
    """

    batch_size: int
    shares: int
    accumulate: int = 1
    group_size: int = 1
    remat: str = "none"

    @classmethod
    def of(cls, config: "Config", shares: int) -> "Division":
        """Return the division of a config."""
        augment, group, train = config.data.augment, config.model.batch_statistics.group or 1, config.train
        pair = 2 if augment.mixup or augment.cutmix else 1
        return cls(train.batch_size, shares, train.accumulate, math.lcm(pair, group), train.remat)

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
        smaller = range(self._unit, self.batch_size, self._unit)
        count = bisect.bisect(smaller, False, key=lambda size: not fits(replace(self, batch_size=size)))
        return replace(self, batch_size=smaller[count - 1]) if count else None

    @property
    def unit_of_slice(self) -> int:
        """The number of which the size of a device's slice is a multiple, also if the slices are not equal."""
        return self.accumulate * self.group_size

    @property
    def _unit(self) -> int:
        return self.shares * self.unit_of_slice


@dataclass(frozen=True)
class Growth:
    """The side of the training images, in pixels, as a function of the step. Small images need less computation.

    Touvron et al. 2019, "Fixing the train-test resolution discrepancy" (arXiv:1906.06423), train on smaller images than
    they evaluate on. As for FFCV's ResNets (github.com/libffcv/ffcv-imagenet, `get_resolution`: 160 to 192 pixels
    between epochs 65 and 76 of 88), the side grows linearly, by default in multiples of 32 pixels.

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
        cls, data: "DataConfig", last: int, *, num_examples: int, batch_size: int, total_steps: int
    ) -> "Growth | None":
        """Return the growth to a side of `last` pixels from a config; None if images do not grow.

        Raises:
            InputError: `data.grow_from` is not below `last`, `data.grow_by` is larger than the difference, or
                `data.grow_start` is after `data.grow_end`.
        """
        if (first := data.grow_from) is None:
            return None
        if first >= last:
            advice = "give a smaller side, or leave ", Key("data.grow_from"), " out"
            raise InputError(Key("data.grow_from", first), f": images grow to {last} pixels", advice=advice)
        if data.grow_by > last - first:
            fault = f": the side grows by only {last - first} pixels, from {first} to {last}"
            raise InputError(Key("data.grow_by", data.grow_by), fault, advice=f"give at most {last - first}")
        run = {"num_examples": num_examples, "batch_size": batch_size, "total_steps": total_steps}
        start, end = (duration.examples(**run) for duration in (data.grow_start, data.grow_end))
        if start > end:
            begin = Key("data.grow_start", data.grow_start, f'"{data.grow_start}"')
            end_key = Key("data.grow_end", data.grow_end, f'"{data.grow_end}"')
            raise InputError(begin, " comes after ", end_key, advice="give an earlier start")
        return cls(first, last, data.grow_by, start, end, batch_size)

    def side(self, step: int) -> int:
        """Return the side of the images of a step; the first step is 0."""
        examples = Fraction(step * self.batch_size)
        if examples >= self.end:
            return self.last
        if examples <= self.start:
            return self.first
        line = self.first + (self.last - self.first) * (examples - self.start) / (self.end - self.start)
        return min(max(math.floor(line / self.by + Fraction(1, 2)) * self.by, self.first), self.last)

    def changes(self, total_steps: int) -> list[int]:
        """Return the steps, among `total_steps` steps, at which the side of the images changes."""
        return [steps.start for steps, _ in self.segments(range(total_steps))][1:]

    def segments(self, steps: range) -> Iterator[tuple[range, int]]:
        """Divide a range of steps at the changes of the side; yield (steps, side) for each part."""
        while steps:
            side = self.side(steps[0])
            same = bisect.bisect_right(steps, side, key=self.side)
            yield steps[:same], side
            steps = steps[same:]
