"""Opens what a run needs: joins its job, and finds its devices, its data, and the layout that follows from them."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

import jaxddp.data.opening as opening
from jaxddp.augment.mixing import check_mixing
from jaxddp.config import Config, DataConfig, ParallelConfig
from jaxddp.core.errors import InputError, Key
from jaxddp.core.peers import Peers
from jaxddp.core.phases import doing
from jaxddp.data.batch import Division, Growth
from jaxddp.data.source import VALIDATION, LabelKind, Source, check_comparable, check_labelled, image_dtype, labels_of
from jaxddp.data.united import class_counts, own_part, unite
from jaxddp.engine.compilation import keep_compiled_programs, step_options
from jaxddp.engine.ways.choice import choose_way
from jaxddp.engine.ways.way import Way
from jaxddp.job.environment import Job, find_job
from jaxddp.job.membership import join
from jaxddp.mesh import Topology, fix_cpu_threads, simulate_cpu_devices
from jaxddp.models.interface import ImageShape
from jaxddp.platforms import platform_named
from jaxddp.recipe.file import RecipeFile
from jaxddp.training.plan import Plan
from jaxddp.workdir.claim import with_absolute_paths


@dataclass(frozen=True)
class TrainingData:
    """Properties of the training data that the objects of a recipe depend on.

    Attributes:
        class_counts: the amount of each class; see `Labels.amounts`.
        images: a function (count) that returns that many training images, [count, H, W, C], or all if there are fewer,
            as pixels that are not normalized. If each process has data of its own, these images are of this process.
        image_shape: the largest shape of the network's input in training.
        eval_shape: the shape of the network's input in evaluation.
    """

    num_examples: int
    labels: LabelKind
    class_counts: np.ndarray = field(repr=False)
    images: Callable[[int], np.ndarray]
    image_shape: ImageShape
    eval_shape: ImageShape
    dtype: np.dtype

    @classmethod
    def of(cls, source: Source, data: DataConfig) -> "TrainingData":
        """Return the properties of a source that is read with the settings `data`."""
        images = functools.partial(opening.sample_images, own_part(source), data)
        shapes = source.image_shape(data), source.image_shape(data.of_evaluation)
        dtype = image_dtype(source, data)
        return cls(len(source), labels_of(source).kind, class_counts(source), images, *shapes, dtype)


@dataclass(frozen=True)
class Layout:
    """The values that a run derives from its config, its data and its devices.

    Attributes:
        growth: the growth of the image size; None if it is constant.
        shapes: the shapes of the training images, smallest first.
    """

    training_data: TrainingData
    plan: Plan
    way: Way
    division: Division
    growth: Growth | None
    shapes: tuple[ImageShape, ...]

    @classmethod
    def of(cls, config: Config, topology: Topology, data: TrainingData) -> "Layout":
        """Make the layout of a config.

        Raises: InputError if the config does not fit the devices or the images, or the run has no step.
        """
        way, plan = choose_way(config, topology), Plan.of(config, data.num_examples)
        if way.parts:
            config.model.batch_statistics.check(config.train.batch_size, way.parts)
            check_mixing(config.data.augment, config.train.batch_size, way.parts)
        shapes, (height, width, channels) = (data.image_shape,), data.image_shape
        if config.data.grow_from is not None and height != width:
            problem = f": these images are {height}x{width}, and only square images can grow"
            advice = "leave ", Key("data.grow_from"), " out"
            raise InputError(Key("data.grow_from", config.data.grow_from), problem, advice=advice)
        growth = Growth.of(config.data, width, **plan.lengths)
        if growth is not None:
            shapes = tuple((side, side, channels) for _, side in growth.segments(range(plan.total_steps)))
        return cls(data, plan, way, Division.of(config, way.shares), growth, shapes)


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
    """Join the job. Return the devices, and the config with its precision and absolute paths.

    Raises: InputError if the processes have different recipes, or the devices do not exist.
    """
    config = file.config
    peers = join_job(find_job(), config.parallel)
    values = {key: str(value) for key, value in config.flat().items()}
    peers.agree(values | {"the recipe file's digest": str(file.digest()), "hooks": str(sorted(file.hooks))})
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
    """The data of a run, and the options of XLA for its devices."""

    train: Source
    val: Source | None = None
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    unlabelled: Source | None = None
    """A second training source, for objectives that use images without labels."""

    def with_val(self, val: Source | None, data: DataConfig, peers: Peers) -> "Resources":
        """Return the resources with other validation data. All processes must call this method together.

        Raises: InputError if an image is missing (a run would find out at its first validation); see also `unite`.
        """
        if getattr(val, "verified", None) is not None:
            cast(Any, val).check(data)
        return replace(self, val=None if val is None else unite(val, data, peers, VALIDATION))


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
    train, val = _united(*opening.open_tables(data, config.eval.limit), config, topology)
    check_comparable(val, train, config.data)
    train, unlabelled = opening.labelled_and_unlabelled(train, config.data)
    return Resources(train, val, options, unlabelled)


def open_validation(
    config: Config, topology: Topology, of_run: opening.RunData, classes: Sequence[tuple[str, ...]], form: str
) -> tuple[Source, Source]:
    """Open both splits; see `open_evaluated`. Check only the images of the validation data. Raises: InputError."""
    train, val = opening.open_evaluated(_data_of_process(config, topology), config.eval.limit, of_run, classes, form)
    with doing("looking for the images"):
        val.check(config.data)
    train, val = _united(train, val, config, topology)
    check_labelled(own_part(val), VALIDATION)
    check_comparable(val, train, config.data)
    return train, val


def open_validation_alone(config: Config, topology: Topology, *, of_all: bool) -> Source:
    """Open and check the validation data, or all data if there is no such split. No training data are needed.

    With `of_all`, the classes are all those of the data, and `data.classes` selects only examples. Raises: InputError.
    """
    data = _data_of_process(config, topology)
    val = opening.open_validation_split(replace(data, classes=None) if of_all else data)
    if of_all and data.classes is not None:
        val = val.rows(labels_of(val).select(data.classes, val.name(0))[0])
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
    return config.data.of_process(topology.peers.process_index)


def _united(train: Any, val: Any, config: Config, topology: Topology) -> tuple[Any, Any]:
    """Return both splits over the examples of all processes, which agree on the validation data; see `unite`."""
    train = None if train is None else unite(train, config.data, topology.peers, "training data")
    val = unite(val, config.data, topology.peers, VALIDATION)
    topology.peers.agree({"validation data": val.fingerprint})
    return train, val


_CHOSEN = None, "the examples are chosen among those of all processes"
_REASONS: dict[str, tuple[Any, str]] = {
    "data.cache": ("none", "each device would hold the images of all processes"),
    "data.sampling": ("shuffled", "the classes are balanced over all examples, and a process knows only its labels"),
    "data.repeats": (1, "the copies of an example would be on one process"),
    "data.unlabelled": (None, "a second source is not divided among the processes"),
    **dict.fromkeys(("data.limit", "data.labels_per_class", "eval.limit"), _CHOSEN),
}
"""The keys that `data.placement=local` does not support: the value that it supports, and the reason."""


def check_placement(config: Config, *, unlabelled: bool = False) -> None:
    """Raise `InputError` if a config with `data.placement=local` has a key that needs the data of all processes.

    The Python API may have a source of `unlabelled` images.
    """
    if config.data.placement == "shared":
        return
    values = config.flat() | ({"data.unlabelled": "a table"} if unlabelled else {})
    for key, (supported, reason) in _REASONS.items():
        if values[key] != supported:
            advice = ("leave ", Key(key), " out") if supported is None else ("set ", Key(key), f" to {supported}")
            shown = Key.plain(key, values[key])
            raise InputError(shown, " with ", Key.plain("data.placement", "local"), f": {reason}", advice=advice)
