"""What every source of examples has in common, and the one place that turns (order, step) into a batch's columns."""

from typing import Any, Literal, Protocol

import numpy as np

from jaxddp.data.batch import Batch
from jaxddp.data.order import Order, shard
from jaxddp.errors import InputError

Split = Literal["train", "val"]
"""The parts of a data set: what is trained on, and what is validated on."""


class Source(Protocol):
    """A data set as training sees it, be it a table of files or arrays in memory."""

    @property
    def num_examples(self) -> int: ...

    @property
    def num_classes(self) -> int: ...

    @property
    def class_names(self) -> tuple[str, ...]: ...

    # Not a property: type checkers do not take a cached property for one.
    fingerprint: Any


def columns(label: np.ndarray, order: Order, step: int, index: int = 0, count: int = 1) -> Batch:
    """Everything of shard `index` of `count` of a step's batch that is known without opening an image.

    Args:
        label: int32[N], the source's labels by row.

    Returns:
        A `Batch` whose `image` is None; padding has mask, label and row 0.

    Raises:
        InputError: the batch does not divide by `count`, or there is no shard `index`.
    """
    rows = shard(order.rows(step), index, count)
    real = rows >= 0
    row = np.where(real, rows, 0).astype(np.int32)
    return Batch(
        image=None,
        label=np.where(real, label[row], 0).astype(np.int32),
        mask=real.astype(np.float32),
        row=row,
        epoch=shard(order.epochs(step), index, count).astype(np.int32),
    )


def stacked_columns(
    label: np.ndarray, order: Order, steps: range, length: int, index: int = 0, count: int = 1
) -> Batch:
    """The `columns` of several steps side by side, each [B, length]: step `steps[k]` is column k.

    What is left of `length` is 0. The batch's axis is the first, so that `Topology.place` shards it as it does a batch.

    Raises:
        InputError: as `columns`.
    """
    each = [columns(label, order, step, index, count) for step in steps]

    def stacked(parts: tuple[Any, ...]) -> np.ndarray | None:
        if parts[0] is None:
            return None
        whole = np.zeros((len(parts[0]), length), parts[0].dtype)
        whole[:, : len(parts)] = np.stack(parts, axis=1)
        return whole

    return Batch(*map(stacked, zip(*each, strict=True)))


def check_order(source: Source, order: Order, index: int, count: int) -> None:
    """Fails before the first batch rather than in it.

    Raises:
        InputError: the order is for another number of examples, its batch does not divide by `count`, or there is no
            shard `index`.
    """
    if order.num_examples != source.num_examples:
        raise InputError(f"an order of {order.num_examples} examples for {source.num_examples}: make an order of these")
    shard(order.rows(0), index, count)
