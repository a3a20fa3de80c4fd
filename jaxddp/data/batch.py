"""`Batch`: the input of the training step, as arrays on the host or on the devices."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxddp.core.errors import shaped

if TYPE_CHECKING:
    from jaxddp.config import DataConfig


class Batch(NamedTuple):
    """A batch of B examples: a pytree of arrays whose first axis has the length B.

    A process makes its own slice of the global batch as NumPy arrays; `Topology.place` converts them to global arrays.
    `row` and `epoch` identify each appearance of an example. Its random augmentation is a function of (seed, epoch,
    row), so it does not depend on the device.
    """

    image: Any
    """uint8 or uint16 [B, H, W, C], the decoded pixels; the device normalizes them."""
    label: Any
    """int32[B], class indices; multi-hot uint8[B, K] if an example may have several classes."""
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

    @classmethod
    def of(cls, data: "DataConfig") -> "PixelFormat":
        """Return the format of a config."""
        return cls(data.channels, data.bits)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the pixels: uint8 or uint16."""
        return np.dtype(np.uint8 if self.bits == 8 else np.uint16)
