"""What travels from the data to the step: one batch, on the host or placed on the devices."""

from typing import Any, NamedTuple

from jaxddp.core.wording import shaped


class Batch(NamedTuple):
    """A batch of examples, a pytree of arrays that share their first axis of B examples.

    On a host it holds that host's slice as NumPy arrays; `Topology.place` turns it into global arrays.
    `row` and `epoch` name each example's appearance, so that whatever is random about it is a function of
    (seed, epoch, row) and not of the device that happens to hold it.
    """

    image: Any
    """uint8 or uint16 [B, H, W, C], as decoded; normalizing happens on the device."""
    label: Any
    """int32[B], dense class indices; uint8[B, K], 1 for each of its classes, where an example may have several."""
    mask: Any
    """float32[B], 1 for an example and 0 for padding."""
    row: Any
    """int32[B], the example's row in its table; 0 where padded."""
    epoch: Any
    """int32[B], how often this example has been seen before; 0 in evaluation."""
    substituted: Any = None
    """float32[B], 1 where another example's image is substituted for one that cannot be used, in the epoch in which the
    batch begins; None where images are never substituted."""
    side: Any = None
    """`jaxddp.augment.resize.Side`, of which no array is: what training resizes the images to on the device; None where
    they keep their size."""
    unlabelled: Any = None
    """A `Batch` from a second source, of a multiple of B examples, whose labels are -1; None where there is none. What
    cuts a batch cuts both alike."""

    def __repr__(self) -> str:
        columns = {name: column for name, column in self._asdict().items() if column is not None}
        told = (f"{name}={shaped(it) if hasattr(it, 'shape') else repr(it)}" for name, it in columns.items())
        return f"Batch({', '.join(told)})"
