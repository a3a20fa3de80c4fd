"""`Batch`: the arrays that a data source passes to the training step, on the host or placed on the devices."""

from typing import Any, NamedTuple

from jaxddp.core.wording import shaped


class Batch(NamedTuple):
    """A batch of examples, a pytree of arrays that share their first axis of B examples.

    A process makes its own slice of the global batch as NumPy arrays; `Topology.place` makes global arrays of it.
    `row` and `epoch` identify each appearance of an example, so its random augmentation is a function of
    (seed, epoch, row), and does not depend on the device that holds it.
    """

    image: Any
    """uint8 or uint16 [B, H, W, C], the decoded pixels; the device normalizes them."""
    label: Any
    """int32[B], class indices; if an example may have several classes, uint8[B, K], 1 for each class."""
    mask: Any
    """float32[B], 1 for an example and 0 for padding."""
    row: Any
    """int32[B], the example's row in its table; 0 where padded."""
    epoch: Any
    """int32[B], how often this example has appeared before; 0 in evaluation."""
    substituted: Any = None
    """float32[B], 1 where an image cannot be used and another example's image takes its place. In a batch that spans
    two epochs, it is 0 for all examples of the second epoch. None if images are never substituted."""
    side: Any = None
    """`jaxddp.augment.resize.Side`, which holds no array: the size to which the device resizes training images; None
    where they keep their size."""
    unlabelled: Any = None
    """A `Batch` from a second source without labels (-1), with a multiple of B examples; None without such a source.
    Code that divides a batch must divide `unlabelled` into as many parts."""

    def __repr__(self) -> str:
        columns = {name: column for name, column in self._asdict().items() if column is not None}
        fields = (f"{name}={shaped(it) if hasattr(it, 'shape') else repr(it)}" for name, it in columns.items())
        return f"Batch({', '.join(fields)})"
