"""A validation split of a data set that has none: a share of each class, by a hash of the examples' ids alone."""

import hashlib
import math

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.wording import show
from jaxddp.data.source import Split
from jaxddp.data.table import ExampleTable


def held_out(table: ExampleTable, share: float, where: str) -> dict[Split, ExampleTable]:
    """The table as "train" and "val", each in its order. Of several classes of an example, the first one counts.

    Args:
        share: of each class that "val" holds out, above 0 and below 1; see `held_out_rows`.
        where: what a person calls the data set.

    Raises:
        InputError: a class of one example, which cannot be in both; names it.
    """
    labels = table.labels if table.label_sets is None else table.label_sets.first
    known = labels[labels >= 0]
    lone = np.flatnonzero(np.bincount(known, minlength=table.num_classes) == 1)
    if len(lone):
        example = table.name(int(np.flatnonzero(labels == lone[0])[0]))
        raise InputError(
            f"{where}: class {show(table.class_ids[lone[0]])} has one example, {example}, and ",
            Key("data.val_share", share, f"{share:g}"),
            " holds out at least one of each class and leaves one to train",
            advice="add examples, or leave the class out",
        )
    # An example without a label is of no class; it stays where it is missed.
    held = np.zeros(len(table), bool)
    held[labels >= 0] = held_out_rows(table.id[labels >= 0], known, share)
    return {"train": table.rows(np.flatnonzero(~held)), "val": table.rows(np.flatnonzero(held))}


def held_out_rows(ids: np.ndarray, labels: np.ndarray, share: float) -> np.ndarray:
    """Which examples are held out, bool[N], of bytes 'S'[N] ids, no two equal, and int[N] labels.

    Of a class of n examples, the k whose ids have the smallest SHA-256, by its first 8 bytes: k is `share * n` rounded
    to the nearest number, halves up, but at least 1 and at most n - 1. So the share of each class is right to half an
    example where that leaves any on both sides, the order of the rows does not matter, and an example more or less
    moves at most one other, which is of its class.
    """
    held = np.zeros(len(ids), bool)
    digests = np.array([int.from_bytes(hashlib.sha256(one).digest()[:8]) for one in ids.tolist()], np.uint64)
    order = np.lexsort((ids, digests, labels))
    _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        wanted = max(1, min(math.floor(share * count + 0.5), count - 1))
        held[order[start : start + wanted]] = True
    return held
