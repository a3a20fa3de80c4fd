"""Repeated augmentation: a training order whose batches have several copies of each of their examples."""

from dataclasses import dataclass, replace

import numpy as np

from jaxddp.core.errors import InputError, Key
from jaxddp.data.order import SampleOrder


@dataclass(frozen=True)
class RepeatedOrder(SampleOrder):
    """An order of batches with m copies of B / m examples (Hoffer et al. 2020, arXiv:1901.09335).

    The examples of a batch are those of a batch of the size B / m in another order. First come all examples once, then
    all examples again, and so on. So mixing pairs two different examples if B / m is above 1, and on m or more devices
    no microbatch of a device has two copies.

    An epoch is still N consecutive positions, as in DeiT. It has m copies of N / m examples, and m epochs have m
    copies of each example. The copies have consecutive values of `epochs`, so their random numbers differ.

    Attributes:
        base: the order of the examples. It gets the seed of this order.
        repeats: m.
    """

    base: SampleOrder
    repeats: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "base", replace(self.base, seed=self.seed))

    @classmethod
    def of(cls, order: SampleOrder, repeats: int) -> "RepeatedOrder":
        """Return the order whose batches have `repeats` copies of the batches of `order`."""
        return cls(order.num_examples, order.batch_size * repeats, order.seed, order, repeats)

    def rows(self, step: int) -> np.ndarray:
        """Return the rows of the global batch, int64[batch_size]."""
        return np.tile(self.base.rows(step), self.repeats)

    def epochs(self, step: int) -> np.ndarray:
        """Return the number of earlier appearances of each row of `rows(step)`, int64[batch_size]."""
        copies = np.arange(self.repeats, dtype=np.int64)[:, None]
        return (self.repeats * self.base.epochs(step) + copies).reshape(-1)


def check_repeats(repeats: int, batch_size: int) -> None:
    """Raise `InputError` if a batch does not have the same number of copies of each example."""
    if batch_size % repeats:
        lower = batch_size // repeats * repeats
        sizes = " or ".join(str(size) for size in (lower, lower + repeats) if size)
        raise InputError(
            Key("data.repeats", repeats),
            " does not divide ",
            Key("train.batch_size", batch_size),
            advice=f"a batch of {sizes} would do",
        )
