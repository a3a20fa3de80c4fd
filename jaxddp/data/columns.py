"""The fields of a batch without its images: labels, masks, rows and epochs."""

from collections.abc import Sized

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted
from jaxddp.data.batch import Batch
from jaxddp.data.order import WHOLE, Order, Shard


def columns(labels: np.ndarray, order: Order, step: int, shard: Shard = WHOLE) -> Batch:
    """Return one shard of the batch of a step, without images. Padding has 0 as mask, label and row.

    Raises: see `Shard.of`.
    """
    rows = shard.of(order.rows(step))
    real = rows >= 0
    row = np.where(real, rows, 0).astype(np.int32)
    several = labels.ndim == 2
    return Batch(
        image=None,
        label=np.where(real[:, None] if several else real, labels[row], 0).astype(np.uint8 if several else np.int32),
        mask=real.astype(np.float32),
        row=row,
        epoch=shard.of(order.epochs(step), padding=0).astype(np.int32),
    )


def stacked_columns(labels: np.ndarray, order: Order, steps: range, shard: Shard = WHOLE) -> Batch:
    """Return the `columns` of several steps, stacked on axis 1: arrays [B, len(steps)].

    The batch axis remains the first axis, so `Topology.place` shards the result like a batch.
    """
    batches = [columns(labels, order, step, shard) for step in steps]
    return Batch(*(None if parts[0] is None else np.stack(parts, axis=1) for parts in zip(*batches, strict=True)))


def check_order(examples: Sized, order: Order, shard: Shard) -> None:
    """Raise `InputError` if an order does not fit the examples or the shard."""
    if order.num_examples != len(examples):
        raise InputError(
            f"an order of {counted(order.num_examples, 'example')}, but the data set has "
            f"{len(examples)}: make an order for this data set"
        )
    shard.of(order.rows(0))
