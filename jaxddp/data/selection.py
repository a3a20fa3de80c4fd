"""Selections from a data set: a validation split that is held out, few labels, or the images of given rows."""

import dataclasses
import hashlib
import logging
import math

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key, counted, show
from jaxddp.data.labels import labels_of
from jaxddp.data.order import ChosenOrder, permutation
from jaxddp.data.source import Source, SourceTable, Split
from jaxddp.data.table import ExampleTable

_log = logging.getLogger("jaxddp.data")


def few_labels(table: SourceTable, per_class: int, seed: int = 0) -> SourceTable:
    """Return `per_class` examples of each class, in the order of the rows.

    The choice in a class depends only on the seed, the id of the class and its number of examples. The examples of a
    smaller `per_class` are a subset of those of a larger `per_class`. Examples without a label are omitted.

    Raises:
        InputError: a class has fewer than `per_class` examples, or images have several labels.
    """
    labels = labels_of(table)
    if labels.several:
        raise InputError(Key("data.labels_per_class"), " takes one label per image, but the training data have several")
    counts = labels.counts
    if (least := int(counts.min())) < per_class:
        name = show(labels.ids[int(counts.argmin())])
        advice = f"give at most {least}" if least else ("leave it out, by ", Key("data.classes"))
        raise InputError(
            Key("data.labels_per_class", per_class),
            f": there {'is' if least == 1 else 'are'} {counted(least, 'example')} of class {name}",
            advice=advice,
        )
    by_class = np.argsort(labels.values, kind="stable")[-counts.sum() :]
    ends = np.cumsum(counts)
    chosen = [
        by_class[end - count : end][permutation(int(count), seed, _word(class_id))[:per_class]]
        for class_id, count, end in zip(labels.ids, counts, ends, strict=True)
    ]
    return table.rows(np.sort(np.concatenate(chosen)))


def _word(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def held_out(table: ExampleTable, share: float, where: str) -> dict[Split, ExampleTable]:
    """Divide a table into "train" and "val", each in the order of the rows.

    An example with several classes counts as an example of its first class.

    Args:
        share: the share of each class for "val", above 0 and below 1; see `held_out_rows`.
        where: a readable name of the data set, for messages.

    Raises:
        InputError: a class has only one example, and each split needs one.
    """
    labels = table.labels.argmax(1) if labels_of(table).several else table.labels
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


def chosen_images(source: Source, data: DataConfig, rows: np.ndarray) -> np.ndarray:
    """Return the evaluation images, [n, H, W, C], of int[n] rows, n >= 1. Raises: see `Source.eval_batches`."""
    return np.asarray(next(iter(source.eval_batches(_in_one_batch(source, rows), data))).image)


def sample_images(source: Source, data: DataConfig, count: int) -> np.ndarray:
    """Return at most `count` training images, [n, H, W, C], without random crops, in proportion to the classes.

    Raises: InputError if an image cannot be used.
    """
    order, whole = _in_one_batch(source, labels_of(source).share(count)), dataclasses.replace(data, crop="whole")
    return next(iter(source.train_batches(order, whole, range(1), substitutes=source.substitutes(whole)))).image


def _in_one_batch(source: Source, rows: np.ndarray) -> ChosenOrder:
    return ChosenOrder(len(source), len(rows), chosen=tuple(rows.tolist()))
