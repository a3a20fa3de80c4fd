"""The data sources and the devices of a run."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from jaxddp.config import Config, DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.phases import doing
from jaxddp.core.wording import counted
from jaxddp.data.labels import labels_of
from jaxddp.data.opening import labelled_and_unlabelled, open_tables, open_unchecked, open_validation_split
from jaxddp.data.selection import few_labels
from jaxddp.data.source import Source, SourceTable, check_labelled, image_dtype
from jaxddp.data.united import VALIDATION, class_counts, own_part, unite
from jaxddp.engine.compilation import step_options
from jaxddp.engine.gradients import Gradients
from jaxddp.mesh import Topology
from jaxddp.setup.local_data import check_placement

_log = logging.getLogger("jaxddp.experiment")


@dataclass(frozen=True)
class Resources:
    """The devices and the data of a run.

    Attributes:
        topology: the devices of all processes.
        train: the training data.
        val: the validation data, if any.
        compiler_options: XLA options for the training step.
        unlabelled: a second training source, for objectives that use images without labels.
    """

    topology: Topology
    train: Source
    val: Source | None = None
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    unlabelled: Source | None = None

    def with_val(self, val: Source | None, data: DataConfig) -> "Resources":
        """Return the resources with other validation data. All processes must call this method together.

        Raises: InputError if an image is missing (a run would find out at its first validation); see also `unite`.
        """
        if val is not None:
            if getattr(val, "verified", None) is not None:
                cast(SourceTable, val).check(data)
            val = unite(val, data, self.topology.peers, VALIDATION)
        return replace(self, val=val)


def resources_of(config: Config, topology: Topology, train: Source, unlabelled: Source | None) -> Resources:
    """Return the resources of a training source from Python. Raises: InputError; see `check_placement` and `unite`."""
    check_placement(config, unlabelled=unlabelled is not None)
    train = unite(train, config.data, topology.peers, "training data")
    return Resources(topology, train, None, step_options(config, topology), unlabelled)


def open_resources(config: Config, topology: Topology) -> Resources:
    """Open the data that a config names, and check that its batches can be divided. Raises: InputError."""
    check_placement(config)
    Gradients.of(config, topology).check_batch_size(config.train.batch_size, topology)
    if config.eval.every.amount:
        topology.check_batch_size(config.eval.batch_size, "eval.batch_size")
    options = step_options(config, topology)
    train, val = open_tables(config.data.of_process(topology.process_index), config.eval.limit)
    train, val = unite_splits(train, val, config.data, topology)
    topology.peers.agree({"validation data": val.fingerprint})
    check_comparable(val, train, config.data)
    train, unlabelled = labelled_and_unlabelled(train, config.data)
    return Resources(topology, train, val, options, unlabelled)


def open_validation(config: Config, topology: Topology) -> tuple[Source, Source]:
    """Open the training and the validation data. Check only the images of the validation data. Raises: InputError."""
    check_placement(config)
    topology.check_batch_size(config.eval.batch_size, "eval.batch_size")
    train, val = open_unchecked(config.data.of_process(topology.process_index), config.eval.limit)
    with doing("looking for the images"):
        val.check(config.data)
    train, val = unite_splits(train, val, config.data, topology)
    topology.peers.agree({"validation data": val.fingerprint})
    check_labelled(own_part(val), VALIDATION)
    check_comparable(val, train, config.data)
    if config.data.labels_per_class is not None:
        train = few_labels(train, config.data.labels_per_class, config.data.labels_seed)
    return train, val


def open_validation_alone(config: Config, topology: Topology, *, of_all: bool) -> Source:
    """Open and check the validation data, or all data if there is no such split. No training data are needed.

    Args:
        of_all: whether the classes are all those of the data, also with `data.classes`, which then selects examples.

    Raises: InputError.
    """
    check_placement(config)
    topology.check_batch_size(config.eval.batch_size, "eval.batch_size")
    data = config.data.of_process(topology.process_index)
    val = open_validation_split(replace(data, classes=None) if of_all else data)
    if of_all and data.classes is not None:
        val = val.rows(labels_of(val).select(data.classes, val.name(0))[1])
    if config.eval.limit is not None:
        val = val.take(config.eval.limit)
    with doing("looking for the images"):
        val.check(config.data)
    val = unite(val, config.data, topology.peers, VALIDATION)
    topology.peers.agree({"validation data": val.fingerprint})
    check_labelled(own_part(val), VALIDATION)
    val.check_evaluation(config.data.of_evaluation)
    return val


def unite_splits(train: Any, val: Any, data: DataConfig, topology: Topology) -> tuple[Any, Any]:
    """Return both splits over the examples of all processes; see `unite`."""
    train = unite(train, data, topology.peers, "training data")
    return train, unite(val, data, topology.peers, VALIDATION)


def check_comparable(source: Source, trained: Source, data: DataConfig) -> None:
    """Check that a source has images and classes like the training data. Raises: InputError."""
    if len(source.class_ids) != len(trained.class_ids):
        raise InputError(
            f"validation data: {counted(len(source.class_ids), 'class')}, and {len(trained.class_ids)} in the "
            "training data; select the same classes in both"
        )
    for label, (class_id, trained_id) in enumerate(zip(source.class_ids, trained.class_ids, strict=True)):
        if class_id != trained_id:
            raise InputError(
                f"validation data: class {label} is {class_id!r}, and {trained_id!r} in the training data; "
                "select the same classes in both"
            )
    if labels_of(source).several != labels_of(trained).several:
        labels, trained_labels = ("several labels", "one") if labels_of(source).several else ("one label", "several")
        raise InputError(
            f"validation data: {labels} per image, and {trained_labels} in the training data; give one label per "
            "image in both, or several in both"
        )
    data = data.of_evaluation
    check_pixels(source, trained, data, "validation data")
    source.check_evaluation(data)


def warn_of_unseen_classes(source: Source, trained: Source) -> None:
    """Log a warning if a source has classes without any training examples."""
    counts, trained_counts = class_counts(source), class_counts(trained)
    unseen = np.flatnonzero((counts > 0) & (trained_counts == 0))
    if len(unseen):
        names = ", ".join(repr(source.class_names[label]) for label in unseen[:3])
        more = f" and {len(unseen) - 3:,} more" if len(unseen) > 3 else ""
        _log.warning(
            f"validation data: {counts[unseen].sum():,} of {counted(len(source), 'example')} are of classes without "
            f"any training examples: {names}{more}"
        )


def check_pixels(source: Source, trained: Source, data: DataConfig, what: str) -> None:
    """Check that a source has images like the training data; `what` names it in messages. Raises: InputError."""
    if source.image_shape(data) != trained.image_shape(data):
        shapes = f"{source.image_shape(data)}, and {trained.image_shape(data)} in the training data"
        raise InputError(f"{what}: images of {shapes}; give both the same shape")
    if image_dtype(source, data) != image_dtype(trained, data):
        dtypes = f"{image_dtype(source, data)}, and {image_dtype(trained, data)} in the training data"
        raise InputError(f"{what}: pixels of {dtypes}; give both the same dtype")
