"""Hold out a validation split: a share of each class, chosen by a hash of the ids of the examples."""

import hashlib
import math

import numpy as np

from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import show
from jaxddp.data.source import Split
from jaxddp.data.table import ExampleTable


def held_out(table: ExampleTable, share: float, where: str) -> dict[Split, ExampleTable]:
    """Divide a table into "train" and "val", each in the order of the rows.

    An example with several classes counts as an example of its first class.

    Args:
        share: the share of each class for "val", above 0 and below 1; see `held_out_rows`.
        where: a readable name of the data set, for messages.

    Raises:
        InputError: a class has only one example, and each split needs one.
    """
    labels = table.labels if table.label_sets is None else table.label_sets.first
    labelled = labels[labels >= 0]
    single_classes = np.flatnonzero(np.bincount(labelled, minlength=table.num_classes) == 1)
    if len(single_classes):
        example = table.name(int(np.flatnonzero(labels == single_classes[0])[0]))
        raise InputError(
            f"{where}: class {show(table.class_ids[single_classes[0]])} has only one example, {example}, but ",
            Key("data.val_share", share, f"{share:g}"),
            " needs two of each class: one to hold out and one to train",
            advice="add examples, or leave the class out",
        )
    # Examples without a label stay in the training split, where `check_labelled` raises an error about them.
    is_held_out = np.zeros(len(table), bool)
    is_held_out[labels >= 0] = held_out_rows(table.id[labels >= 0], labelled, share)
    return {"train": table.rows(np.flatnonzero(~is_held_out)), "val": table.rows(np.flatnonzero(is_held_out))}


def held_out_rows(ids: np.ndarray, labels: np.ndarray, share: float) -> np.ndarray:
    """Return a mask of the examples that are held out, bool[N].

    In a class of n examples, these are the k examples whose ids have the smallest hashes (the first 8 bytes of
    SHA-256). k is `share * n`, rounded to the nearest integer (halves up) and limited to 1..n-1. The order of the rows
    has no effect. Adding or removing an example moves at most one other example, of the same class, to the other split.

    Args:
        ids: bytes 'S'[N], unique.
        labels: int[N], class indices.
    """
    is_held_out = np.zeros(len(ids), bool)
    digests = np.array([int.from_bytes(hashlib.sha256(one).digest()[:8]) for one in ids.tolist()], np.uint64)
    order = np.lexsort((ids, digests, labels))
    _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        wanted = max(1, min(math.floor(share * count + 0.5), count - 1))
        is_held_out[order[start : start + wanted]] = True
    return is_held_out
