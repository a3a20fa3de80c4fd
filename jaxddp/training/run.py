"""One training, made ready: all that `jaxddp.training.loop.fit` takes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxddp.data.batch_plan.division import Division
from jaxddp.engine.checks.replicas import Replicas
from jaxddp.engine.checks.self_test import SelfTest
from jaxddp.engine.parts.part import Follow, Part
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import Program
from jaxddp.measure.cost import Cost
from jaxddp.mesh import Topology
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.events import RunStart, Used
from jaxddp.training.plan import Plan
from jaxddp.training.validation.early_stopping import EarlyStopping
from jaxddp.training.validation.evaluator import Evaluator
from jaxddp.training.validation.image_predictor import ImagePredictor


class Chunk(NamedTuple):
    """Steps that are dispatched together, and what the program that takes them is given beside the state."""

    steps: int
    feed: tuple[Any, ...]


Chunks = Callable[[int], Iterator[Chunk]]
"""How many steps are done -> the chunks of all that follow; nothing is due before a chunk's end (`Plan.chunks`)."""


class Growing(NamedTuple):
    """Of a run whose images grow.

    Attributes:
        side: of the images of a step, in pixels; 0 is the first step.
        largest: what a chunk is fed with -> the same with the largest images of the run, or their shapes.
    """

    side: Callable[[int], int]
    largest: Callable[[tuple[Any, ...]], tuple[Any, ...]]


@dataclass(frozen=True)
class Stepping:
    """How steps are taken, and what feeds them.

    Attributes:
        division: of each batch.
        parts: of the step.
        follow: tells each validation to these parts.
        learning_rate: a schedule, 0 for the first step, to be shown.
        growing: where images grow; None where all have one size.
    """

    program: Program
    chunks: Chunks
    division: Division
    parts: Sequence[Part] = ()
    follow: Follow = lambda state, metrics: state
    learning_rate: Callable[[int], Any] | None = None
    growing: Growing | None = None


@dataclass(frozen=True)
class Checks:
    """What sees that steps are right.

    Attributes:
        self_test: of the averaged gradient, before the first step; None tests nothing.
        replicas: what compares the devices' states, as the plan says and before one is saved; None compares nothing.
        suspects: says which examples of a step's batch have a loss that is not finite, of a state and the step; all
            processes ask together.
    """

    self_test: SelfTest | None = None
    replicas: Replicas | None = None
    suspects: Callable[[TrainState, int], str] = lambda state, step: ""


@dataclass(frozen=True)
class Validation:
    """What is measured, and what follows.

    Attributes:
        evaluator: of the validation set; None validates nothing.
        predictor: of the validation images that the listeners want to show; None where they want none.
        early_stopping: before the first validation; which validation is the best, and when they end the run.
    """

    evaluator: Evaluator | None = None
    predictor: ImagePredictor | None = None
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)


@dataclass(frozen=True)
class Keeping:
    """What a run keeps, and what it was restored from.

    Attributes:
        checkpoints: where states are saved; None saves nothing.
        should_stop: asked after every chunk and between batches of validation; all processes must answer alike.
        profile: where a trace of the steps goes that the plan names; None for none.
        progress: of the running epoch, as it was saved beside the state.
        validated: the `flat` metrics of the checkpoint that the state was restored from; None where it was not
            validated yet, and empty where the state was not restored.
    """

    checkpoints: Checkpoints | None = None
    should_stop: Callable[[int], bool] = lambda step: False
    profile: Path | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    validated: Mapping[str, float | None] | None = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """What is trained from where to where, and what it reports to.

    Attributes:
        state: replicated, where it begins; its step says how many are done. It is consumed.
        listeners: see `jaxddp.training.events.Listener`; the first process's alone.
        record: the content of config.json, for the listeners.
        class_names: those of the training data, for the listeners.
    """

    plan: Plan
    topology: Topology
    state: TrainState
    steps: Stepping
    checks: Checks = field(default_factory=Checks)
    validation: Validation = field(default_factory=Validation)
    keeping: Keeping = field(default_factory=Keeping)
    listeners: Sequence[Any] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()

    def usage(self, images_per_second: float | None, cost: Cost | None) -> Used:
        """How well the devices are used at a speed, by steps of that cost."""
        memory = self.topology.peak_memory()
        if cost is None:
            return Used(peak_memory=memory)
        utilization = None
        if images_per_second:
            seconds = self.plan.batch_size / images_per_second
            utilization = cost.utilization(seconds, self.topology.num_devices, self.topology.device_kind)
        return Used(cost.flops, utilization, memory)

    def start(self) -> RunStart:
        """What the listeners are told first."""
        done, checkpoints = int(self.state.step), self.keeping.checkpoints
        return RunStart(
            start_step=done,
            total_steps=self.plan.total_steps,
            batch_size=self.plan.batch_size,
            num_examples=self.plan.num_examples,
            devices=self.topology.num_devices,
            processes=self.topology.process_count,
            device_kind=self.topology.device_kind,
            params=self.state.params,
            traced=self.plan.traced(done) if self.plan.profile and self.keeping.profile else None,
            workdir=checkpoints.directory.parent if checkpoints else None,
            config=self.record,
            class_names=self.class_names,
            logged=self.keeping.progress.get("logged"),
        )
