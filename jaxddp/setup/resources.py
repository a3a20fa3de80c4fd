"""Opens what a run needs: joins its job, and finds its devices and its data."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from jaxddp.config import Config, DataConfig, ParallelConfig
from jaxddp.config.values import flatten
from jaxddp.core.errors import InputError, Key, counted
from jaxddp.core.peers import Peers
from jaxddp.core.phases import doing
from jaxddp.data.labels import labels_of
from jaxddp.data.opening import labelled_and_unlabelled, open_tables, open_unchecked, open_validation_split
from jaxddp.data.selection import few_labels
from jaxddp.data.source import Source, SourceTable, check_labelled, image_dtype
from jaxddp.data.united import VALIDATION, class_counts, own_part, unite
from jaxddp.engine.compilation import keep_compiled_programs, step_options
from jaxddp.engine.ways.choice import choose_way
from jaxddp.job.environment import Job, find_job
from jaxddp.job.membership import join
from jaxddp.mesh import Topology, fix_cpu_threads, simulate_cpu_devices
from jaxddp.platforms import platform_named
from jaxddp.recipe.file import RecipeFile
from jaxddp.workdir.claim import with_absolute_paths


def join_job(job: Job | None, parallel: ParallelConfig) -> Peers:
    """Join the job with the time limits of a config. Programs that are compiled later are cached on disk."""
    if parallel.cpu_devices is not None:
        simulate_cpu_devices(parallel.cpu_devices)
    if parallel.reproducible:
        fix_cpu_threads()
    waits = {"silence": parallel.heartbeat_timeout, "stall": parallel.stall_timeout}
    peers = join(job, start=parallel.start_timeout, **waits, shutdown=parallel.shutdown_timeout)
    keep_compiled_programs(peers)
    return peers


def join_and_resolve(file: RecipeFile) -> tuple[Topology, Config]:
    """Join the job, check that all processes have the same recipe, and find the devices.

    Returns:
        The devices, and the config with its precision and absolute paths.

    Raises: InputError if the processes have different recipes, or the devices do not exist.
    """
    config = file.config
    peers = join_job(find_job(), config.parallel)
    values = {key: str(value) for key, value in flatten(config.to_dict()).items()}
    peers.agree(values | {"the recipe file's digest": str(file.digest()), "replaced hooks": str(file.replaced)})
    topology = Topology.create(config.parallel.devices, peers)
    if file.notice and peers.is_first:
        _log.info(file.notice)
    config = with_absolute_paths(config, peers)
    if config.train.precision is None:
        config = config.replace(train={"precision": platform_named(topology.platform).precision})
    return topology, config


_log = logging.getLogger("jaxddp.experiment")


@dataclass(frozen=True)
class Resources:
    """The data of a run, and the options of XLA for its devices.

    Attributes:
        train: the training data.
        val: the validation data, if any.
        compiler_options: XLA options for the training step.
        unlabelled: a second training source, for objectives that use images without labels.
    """

    train: Source
    val: Source | None = None
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    unlabelled: Source | None = None

    def with_val(self, val: Source | None, data: DataConfig, peers: Peers) -> "Resources":
        """Return the resources with other validation data. All processes must call this method together.

        Raises: InputError if an image is missing (a run would find out at its first validation); see also `unite`.
        """
        if val is not None:
            if getattr(val, "verified", None) is not None:
                cast(SourceTable, val).check(data)
            val = unite(val, data, peers, VALIDATION)
        return replace(self, val=val)


def resources_of(config: Config, topology: Topology, train: Source, unlabelled: Source | None) -> Resources:
    """Return the resources of a training source from Python. Raises: InputError; see `check_placement` and `unite`."""
    check_placement(config, unlabelled=unlabelled is not None)
    train = unite(train, config.data, topology.peers, "training data")
    return Resources(train, None, step_options(config, topology), unlabelled)


def open_resources(config: Config, topology: Topology) -> Resources:
    """Open the data that a config names, and check that its batches can be divided. Raises: InputError."""
    choose_way(config, topology)
    data = _data_of_process(config, topology, measures=bool(config.eval.every.amount))
    options = step_options(config, topology)
    train, val = _united(*open_tables(data, config.eval.limit), config, topology)
    check_comparable(val, train, config.data)
    train, unlabelled = labelled_and_unlabelled(train, config.data)
    return Resources(train, val, options, unlabelled)


def open_validation(config: Config, topology: Topology) -> tuple[Source, Source]:
    """Open the training and the validation data. Check only the images of the validation data. Raises: InputError."""
    train, val = open_unchecked(_data_of_process(config, topology), config.eval.limit)
    with doing("looking for the images"):
        val.check(config.data)
    train, val = _united(train, val, config, topology)
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
    data = _data_of_process(config, topology)
    val = open_validation_split(replace(data, classes=None) if of_all else data)
    if of_all and data.classes is not None:
        val = val.rows(labels_of(val).select(data.classes, val.name(0))[1])
    if config.eval.limit is not None:
        val = val.take(config.eval.limit)
    with doing("looking for the images"):
        val.check(config.data)
    _, val = _united(None, val, config, topology)
    check_labelled(own_part(val), VALIDATION)
    val.check_evaluation(config.data.of_evaluation)
    return val


def _data_of_process(config: Config, topology: Topology, *, measures: bool = True) -> DataConfig:
    """Return the data that this process opens, after a check that the config fits them and the devices."""
    check_placement(config)
    if measures:
        topology.check_batch_size(config.eval.batch_size, "eval.batch_size")
    return config.data.of_process(topology.process_index)


def _united(train: Any, val: Any, config: Config, topology: Topology) -> tuple[Any, Any]:
    """Return both splits over the examples of all processes, which agree on the validation data; see `unite`."""
    train = None if train is None else unite(train, config.data, topology.peers, "training data")
    val = unite(val, config.data, topology.peers, VALIDATION)
    topology.peers.agree({"validation data": val.fingerprint})
    return train, val


def check_comparable(source: Source, trained: Source, data: DataConfig) -> None:
    """Check that a source has images and classes like the training data. Raises: InputError."""
    ids, trained_ids = source.class_ids, trained.class_ids
    same_classes = "select the same classes in both"
    if len(ids) != len(trained_ids):
        raise _differ(VALIDATION, counted(len(ids), "class"), len(trained_ids), same_classes)
    for label, (class_id, trained_id) in enumerate(zip(ids, trained_ids, strict=True)):
        if class_id != trained_id:
            raise _differ(VALIDATION, f"class {label} is {class_id!r}", repr(trained_id), same_classes)
    if (several := labels_of(source).several) != labels_of(trained).several:
        both = ("several labels per image", "one") if several else ("one label per image", "several")
        raise _differ(VALIDATION, *both, "give one label per image in both, or several in both")
    data = data.of_evaluation
    check_pixels(source, trained, data, VALIDATION)
    source.check_evaluation(data)


def check_pixels(source: Source, trained: Source, data: DataConfig, what: str) -> None:
    """Check that a source has images like the training data; `what` names it in messages. Raises: InputError."""
    if (shape := source.image_shape(data)) != (trained_shape := trained.image_shape(data)):
        raise _differ(what, f"images of {shape}", trained_shape, "give both the same shape")
    if (dtype := image_dtype(source, data)) != (trained_dtype := image_dtype(trained, data)):
        raise _differ(what, f"pixels of {dtype}", trained_dtype, "give both the same dtype")


def _differ(what: str, found: str, trained: object, advice: str) -> InputError:
    return InputError(f"{what}: {found}, and {trained} in the training data; {advice}")


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


_REASONS: dict[str, tuple[Any, str]] = {
    "data.cache": ("none", "each device would hold the images of all processes"),
    "data.sampling": ("shuffled", "the classes are balanced over all examples, and a process knows only its labels"),
    "data.repeats": (1, "the copies of an example would be on one process"),
    "data.unlabelled": (None, "a second source is not divided among the processes"),
    **dict.fromkeys(
        ("data.limit", "data.labels_per_class", "eval.limit"),
        (None, "the examples are chosen among those of all processes"),
    ),
}
"""The keys that `data.placement=local` does not support: the value that it supports, and the reason."""


def check_placement(config: Config, *, unlabelled: bool = False) -> None:
    """Check that a config with `data.placement=local` has no key that needs the data of all processes.

    Args:
        unlabelled: whether a source of unlabelled images was passed to the Python API.

    Raises:
        InputError: a key has an unsupported value.
    """
    if config.data.placement == "shared":
        return
    values = flatten(config.to_dict())
    if unlabelled:
        values["data.unlabelled"] = "a table"
    for key, (supported, reason) in _REASONS.items():
        if values[key] != supported:
            advice = ("leave ", Key(key), " out") if supported is None else ("set ", Key(key), f" to {supported}")
            shown = Key.plain(key, values[key])
            raise InputError(shown, " with ", Key.plain("data.placement", "local"), f": {reason}", advice=advice)
