"""The layout of a run: the values that it derives from its config, its data and its devices."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxddp.config import Config, DataConfig
from jaxddp.core.errors import InputError, Key
from jaxddp.data.batch_plan import Division, Growth
from jaxddp.data.labels import LabelKind, labels_of
from jaxddp.data.selection import sample_images
from jaxddp.data.source import Source, image_dtype
from jaxddp.data.united import class_counts, own_part
from jaxddp.engine.ways.choice import choose_way
from jaxddp.engine.ways.way import Way
from jaxddp.mesh import Topology
from jaxddp.schedules import Steps
from jaxddp.training.plan import Plan

ImageShape = tuple[int, int, int]
"""The shape (H, W, C) of an image."""


@dataclass(frozen=True)
class TrainingData:
    """Properties of the training data that the objects of a recipe depend on.

    Attributes:
        class_counts: int64[K], the number of examples of each class.
        images: a function (count) that returns that many training images, [count, H, W, C], or all if there are fewer.
            If each process has data of its own, these images are of this process.
        image_shape: the largest shape of the network's input in training.
        eval_shape: the shape of the network's input in evaluation.
        dtype: the dtype of the pixels.
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
        images = functools.partial(sample_images, own_part(source), data)
        shapes = source.image_shape(data), source.image_shape(data.of_evaluation)
        kind, counts = labels_of(source).kind, class_counts(source)
        return cls(len(source), kind, counts, images, *shapes, image_dtype(source, data))

    @property
    def num_classes(self) -> int:
        return self.labels.num_classes


def steps_of(config: Config, plan: Plan) -> Steps:
    """Return the lengths of a run and of its warmup, in steps, for the learning rate schedule."""
    return Steps(plan.total_steps, config.optimizer.warmup.steps(**plan.lengths))


@dataclass(frozen=True)
class Layout:
    """The values that a run derives from its config, its data and its devices.

    Attributes:
        plan: the steps at which the run ends, logs, validates and saves.
        steps: the lengths of the run and of its warmup.
        way: the way in which the devices divide a step.
        division: the division of the global batch among devices and microbatches.
        growth: the growth of the image size; None if it is constant.
        shapes: the shapes of the training images, smallest first.
    """

    training_data: TrainingData
    plan: Plan
    steps: Steps
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
        division = Division.of(config, way.shares)
        shapes, (height, width, channels) = (data.image_shape,), data.image_shape
        if config.data.grow_from is not None and height != width:
            problem = f": these images are {height}x{width}, and only square images can grow"
            advice = "leave ", Key("data.grow_from"), " out"
            raise InputError(Key("data.grow_from", config.data.grow_from), problem, advice=advice)
        growth = Growth.of(config.data, width, **plan.lengths)
        if growth is not None:
            shapes = tuple((side, side, channels) for _, side in growth.segments(range(plan.total_steps)))
        return cls(data, plan, steps_of(config, plan), way, division, growth, shapes)
