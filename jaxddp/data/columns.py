"""All fields of a batch except the images: labels, masks, rows and epochs, from the labels and the order alone."""

from collections.abc import Sized

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted
from jaxddp.data.batch import Batch
from jaxddp.data.order import WHOLE, Order, Shard


def columns(labels: np.ndarray, order: Order, step: int, shard: Shard = WHOLE) -> Batch:
    """Return a shard of a step's batch without images. Padding has mask, label and row 0. Raises: see `Shard.of`."""
    rows = shard.of(order.rows(step))
    real = rows >= 0
    row = np.where(real, rows, 0).astype(np.int32)
    several = labels.ndim == 2
    return Batch(
        image=None,
        label=np.where(real[:, None] if several else real, labels[row], 0).astype(np.uint8 if several else np.int32),
        mask=real.astype(np.float32),
        row=row,
        epoch=shard.of(order.epochs(step)).astype(np.int32),
    )


def stacked_columns(labels: np.ndarray, order: Order, steps: range, shard: Shard = WHOLE) -> Batch:
    """Return the `columns` of several steps, stacked to arrays [B, len(steps)]; column k belongs to step `steps[k]`.

    The batch axis comes first, so `Topology.place` shards the result as it shards a batch.
    """
    batches = [columns(labels, order, step, shard) for step in steps]
    return Batch(*(None if parts[0] is None else np.stack(parts, axis=1) for parts in zip(*batches, strict=True)))


def check_order(examples: Sized, order: Order, shard: Shard) -> None:
    """Check that an order fits the examples and the shard. Raises: InputError if it does not fit."""
    if order.num_examples != len(examples):
        raise InputError(
            f"an order of {counted(order.num_examples, 'example')} for {len(examples)}: make an order for this data set"
        )
    shard.of(order.rows(0))
