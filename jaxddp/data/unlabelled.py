"""The data of training with few labels: a small labelled source and a second, unlabelled source."""

import hashlib
import logging

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key, about
from jaxddp.core.wording import counted, show
from jaxddp.data.example_set import labels_of
from jaxddp.data.opening import open_images
from jaxddp.data.order import permutation
from jaxddp.data.source import SourceTable

TRAIN = "train"
"""The value of `data.unlabelled` for the training images."""
_log = logging.getLogger("jaxddp.data")


def labelled_and_unlabelled(train: SourceTable, data: DataConfig) -> tuple[SourceTable, SourceTable | None]:
    """Return the labelled source, and the unlabelled source if `data.unlabelled` is set, after checking both.

    With `data.unlabelled="train"`, the unlabelled source has all training images, including the labelled images.

    Raises:
        InputError: `few_labels` rejects the labelled data, or the unlabelled images cannot be opened or used.
    """
    unlabelled = None
    if data.unlabelled is not None:
        with about(Key("data.unlabelled")):
            images = train if data.unlabelled == TRAIN else open_images(data.unlabelled, data)
            if images is not train and data.verify == "manifest":
                _log.warning("data.verify=manifest: the images of data.unlabelled are compared with no manifest")
            unlabelled = images.without_labels()
            unlabelled.check(data)
    if data.labels_per_class is not None:
        train = few_labels(train, data.labels_per_class, data.labels_seed)
        train.check(data)
    return train, unlabelled


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
