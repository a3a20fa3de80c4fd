"""One training, made ready: all that `jaxddp.training.loop.fit` takes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxddp.data.division import Division
from jaxddp.engine.following import Follow
from jaxddp.engine.parts.part import Part
from jaxddp.engine.replicas import Replicas
from jaxddp.engine.self_test import SelfTest
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import Program
from jaxddp.measure.cost import Cost
from jaxddp.mesh import Topology
from jaxddp.training.checkpoints import Checkpoints
from jaxddp.training.evaluation import Evaluator
from jaxddp.training.events import RunStart, Used
from jaxddp.training.judgement import Judgement
from jaxddp.training.plan import Plan
from jaxddp.training.predictor import Predictor


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
class Run:
    """What is trained from where to where, what feeds it, and what it reports to.

    Attributes:
        state: replicated, where it begins; its step says how many are done. It is consumed.
        division: of each batch.
        evaluator: of the validation set; None validates nothing.
        predictor: of the validation images that the listeners want to show; None where they want none.
        checkpoints: where states are saved; None saves nothing.
        listeners: see `jaxddp.training.events.Listener`; the first process's alone.
        learning_rate: a schedule, 0 for the first step, to be shown.
        should_stop: asked after every chunk and between batches of validation; all processes must answer alike.
        profile: where a trace of the steps goes that the plan names; None for none.
        progress: of the running epoch, as it was saved beside the state.
        suspects: says which examples of a step's batch have a loss that is not finite, of a state and the step; all
            processes ask together.
        validated: the `flat` metrics of the checkpoint that the state was restored from; None where it was not
            validated yet, and empty where the state was not restored.
        judgement: of no validation; how they are compared, and when they end the run.
        follow: tells each validation to the parts of the step.
        parts: of the step.
        self_test: of the averaged gradient, before the first step; None tests nothing.
        replicas: what compares the devices' states, as the plan says and before one is saved; None compares nothing.
        config, class_names: what config.json says of the run, and of its data, for the listeners.
        growing: where images grow; None where all have one size.
    """

    plan: Plan
    topology: Topology
    state: TrainState
    program: Program
    chunks: Chunks
    division: Division
    evaluator: Evaluator | None = None
    predictor: Predictor | None = None
    checkpoints: Checkpoints | None = None
    listeners: Sequence[Any] = ()
    learning_rate: Callable[[int], Any] | None = None
    should_stop: Callable[[int], bool] = lambda step: False
    profile: Path | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    suspects: Callable[[TrainState, int], str] = lambda state, step: ""
    validated: Mapping[str, float | None] | None = field(default_factory=dict)
    judgement: Judgement = field(default_factory=Judgement)
    follow: Follow = lambda state, metrics: state
    parts: Sequence[Part] = ()
    self_test: SelfTest | None = None
    replicas: Replicas | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    growing: Growing | None = None

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
        done = int(self.state.step)
        return RunStart(
            start_step=done,
            total_steps=self.plan.total_steps,
            batch_size=self.plan.batch_size,
            num_examples=self.plan.num_examples,
            devices=self.topology.num_devices,
            processes=self.topology.process_count,
            device_kind=self.topology.device_kind,
            params=self.state.params,
            traced=self.plan.traced(done) if self.plan.profile and self.profile else None,
            workdir=self.checkpoints.directory.parent if self.checkpoints else None,
            config=self.config,
            class_names=self.class_names,
            logged=self.progress.get("logged"),
        )
