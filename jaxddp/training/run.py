"""The argument of `jaxddp.training.loop.fit`: a run that is ready to train."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxddp.data.batch import Division
from jaxddp.engine.parts.part import Follow, Part
from jaxddp.engine.programs import Program
from jaxddp.engine.replicas import Replicas
from jaxddp.engine.self_test import SelfTest
from jaxddp.engine.state import TrainState, shapes_of_one
from jaxddp.engine.ways.way import Way
from jaxddp.measure.cost import Cost
from jaxddp.mesh import Topology
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.evaluation import EarlyStopping, Evaluator, ImagePredictor
from jaxddp.training.events import Description, RunStart, Usage
from jaxddp.training.plan import Plan


class Chunk(NamedTuple):
    """Steps that are dispatched together, and the program's arguments after the state (the feed)."""

    steps: int
    feed: tuple[Any, ...]


Chunks = Callable[[int], Iterator[Chunk]]
"""Maps the number of completed steps to the chunks of all later steps; see `Plan.chunks`."""


class ImageGrowth(NamedTuple):
    """The image sizes of a run whose images grow.

    Attributes:
        side: maps a step, from 0, to the side of its images in pixels.
        largest: maps the feed of a chunk to a feed with the largest images of the run, or with their shapes.
    """

    side: Callable[[int], int]
    largest: Callable[[tuple[Any, ...]], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is ready to train.

    Attributes:
        plan: the steps at which the run ends, logs, validates and saves.
        topology: the devices.
        state: the replicated state to begin with; its `step` is the number of steps done. Training consumes it.
        way: the way in which the devices divide a step.
        program: the program of the steps.
        chunks: the input of the program.
        division: the division of each batch among devices and microbatches.
        parts: the optional parts of the step.
        follow: passes the metrics of a validation to the parts.
        own_statistics: gives the averaged parameters of the last state batch statistics of their own; None if there is
            no average, or it needs none.
        learning_rate: maps a step, from 0, to the learning rate, for the log; None if unknown.
        growth: the image sizes; None if all images have one size.
        self_test: tests the averaged gradient before the first step; None for no such test.
        replicas: compares the devices' states at the plan's cadence and before each save; None for no comparison.
        suspects: maps the state and a step to a text that lists the examples of the step's batch whose loss is not
            finite. All processes must call it together.
        evaluator: evaluates the validation set; None for a run without validation.
        predictor: predicts the validation images that listeners request; None if no listener requests any.
        early_stopping: the criterion by which validation stops the run, before the first validation.
        description: the run in words, for the listeners.
        checkpoints: saves the states; None for a run without checkpoints.
        should_stop: returns whether to stop after a step, with the same result on all processes. It is called after
            every chunk and between batches of validation.
        profile: the folder for the trace of the steps of `Plan.traced`; None if no step is traced.
        progress: the values that the loop saved in addition to the state, such as the sums of the current epoch.
        validated: the `flat` metrics of the restored checkpoint; None if this checkpoint was not validated yet, empty
            if the state is not from a checkpoint.
        listeners: see `jaxddp.training.events.Listener`; only the first process calls its listeners.
        record: the content of config.json, for the listeners.
        class_names: the class names of the training data, for the listeners.
    """

    plan: Plan
    topology: Topology
    state: TrainState
    way: Way
    program: Program
    chunks: Chunks
    division: Division
    parts: Sequence[Part] = ()
    follow: Follow = lambda state, metrics: state
    own_statistics: Callable[[TrainState], TrainState] | None = None
    learning_rate: Callable[[int], Any] | None = None
    growth: ImageGrowth | None = None
    self_test: SelfTest | None = None
    replicas: Replicas | None = None
    suspects: Callable[[TrainState, int], str] = lambda state, step: ""
    evaluator: Evaluator | None = None
    predictor: ImagePredictor | None = None
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    description: Description = field(default_factory=Description)
    checkpoints: Checkpoints | None = None
    should_stop: Callable[[int], bool] = lambda step: False
    profile: Path | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    validated: Mapping[str, float | None] | None = field(default_factory=dict)
    listeners: Sequence[Any] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()

    def usage(self, images_per_second: float | None, cost: Cost | None) -> Usage:
        """Return the utilization and the peak memory of the devices, given a speed and the cost of a step."""
        utilization, topology = None, self.topology
        if cost is not None and images_per_second:
            seconds = self.plan.batch_size / images_per_second
            utilization = cost.utilization(seconds, topology.num_devices, topology.device_kind)
        return Usage(cost and cost.flops, utilization, topology.peak_memory())

    def start(self) -> RunStart:
        """Return the record of the run's start for the listeners."""
        done, plan, topology = int(self.state.step), self.plan, self.topology
        return RunStart(
            start_step=done,
            total_steps=plan.total_steps,
            batch_size=plan.batch_size,
            num_examples=plan.num_examples,
            devices=topology.num_devices,
            processes=topology.peers.process_count,
            device_kind=topology.device_kind,
            params=shapes_of_one(self.state).params,
            traced=plan.traced(done) if plan.profile and self.profile else None,
            workdir=self.checkpoints.directory.parent if self.checkpoints else None,
            config=self.record,
            class_names=self.class_names,
            num_validation=0 if self.evaluator is None else self.evaluator.num_examples,
            description=self.description,
            logged=self.progress.get("logged"),
        )
