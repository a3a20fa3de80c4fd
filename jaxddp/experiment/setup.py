"""Where the objects of a run are put together, for the terminal and for notebooks alike."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import optax

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import DataConfig
from jaxddp.data.batch import Batch
from jaxddp.data.opening import Table
from jaxddp.data.order import SampleOrder
from jaxddp.data.substitutes import Substitutes
from jaxddp.engine.objective import Loss, Metric, Objective, top_k_metrics
from jaxddp.engine.program import Program
from jaxddp.engine.resident_steps import loops_are_slow, make_resident_steps
from jaxddp.engine.state import TrainState, create_state
from jaxddp.engine.step import make_eval_step, make_train_step
from jaxddp.experiment.batches import (
    check_comparable,
    eval_batches,
    image_shape,
    make_preprocess,
    make_substitutes,
    train_batches,
)
from jaxddp.experiment.resident_images import LONGEST_CHUNK, check_cacheable, load_images, resident_chunks
from jaxddp.job.membership import agree, exchange
from jaxddp.measure.usage import Usage
from jaxddp.mesh import Device, Topology
from jaxddp.models.adapt import Model, adapt
from jaxddp.training.checkpoints import Checkpoints
from jaxddp.training.evaluation import Evaluator
from jaxddp.training.events import Listener, RunStart
from jaxddp.training.loop import Chunk, Chunks, fit, single_steps
from jaxddp.training.plan import Plan


@dataclass(frozen=True)
class RunSetup:
    """A run made ready: model, data and optimizer laid out over the devices.

    Attributes:
        state: replicated on every device; `dataclasses.replace(setup, state=trained)` goes on from a trained one.
        order: which rows of `table` make up each global batch.
        images: the training images on every device, put there at the first call; None where batches are streamed.
        substitutes: what stands in for images that cannot be used; None where they end the run.
        compiler_options: XLA's for the training step, see `jaxddp.engine.compiler_options`.
    """

    topology: Topology
    model: Model
    optimizer: optax.GradientTransformation
    table: Table
    order: SampleOrder
    data: DataConfig
    preprocess: Preprocess
    state: TrainState = field(repr=False)
    epochs: float = 1
    images: Callable[[], jax.Array] | None = field(default=None, repr=False)
    substitutes: Substitutes | None = field(default=None, repr=False)
    compiler_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def slices(self) -> list[tuple[Device, slice]]:
        """Per device, in mesh order, the rows of a global batch that it gets."""
        return self.topology.slices(self.order.batch_size)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The placed training batches of steps `start` to `stop - 1`; nothing before `start` is read."""
        return train_batches(self.table, self.order, self.data, self.topology, start, stop, self.substitutes)

    def eval_batches(self, table: Table, batch_size: int) -> Iterator[Batch]:
        """Placed batches that hold each example of a table once; the last is padded and masked."""
        return eval_batches(table, batch_size, self.data, self.topology)

    def objective(self, loss: Loss, metrics: Mapping[str, Metric] | None = None) -> Objective:
        """The loss of this model on this input; top-1 (and top-5) where no metrics are named."""
        named = top_k_metrics(self.table.num_classes) if metrics is None else metrics
        return Objective(self.model, loss, self.preprocess, named)

    def program(
        self, objective: Objective, plan: Plan, schedule: optax.Schedule | None = None
    ) -> tuple[Program, Chunks]:
        """What `fit` takes: the program of the steps, and what feeds it, which is placed batches or
        the rows of images that are on the devices already.
        """
        settings = {"seed": self.order.seed, "schedule": schedule, "compiler_options": self.compiler_options}
        if self.images is None:
            step = make_train_step(objective, self.optimizer, self.topology, **settings)
            return Program(step), lambda done: single_steps(self.batches(done, plan.total_steps))
        images = self.images()
        slow = loops_are_slow(objective, self.state, images.shape[1:], self.topology)
        length = 1 if slow else LONGEST_CHUNK
        steps = make_resident_steps(objective, self.optimizer, self.topology, length=length, **settings)

        def chunks(done: int) -> Iterator[Chunk]:
            return resident_chunks(self.table, self.order, self.topology, plan.chunks(done, length), length)

        return Program(steps, lambda feed: (images, *feed)), chunks

    def evaluator(
        self,
        objective: Objective,
        table: Table,
        batch_size: int | None = None,
        extra: Sequence[Callable[[TrainState], Mapping[str, float]]] = (),
    ) -> Evaluator:
        """Measures a state over a table, in batches of `batch_size` (the training batch where absent).

        Raises:
            InputError: the batch cannot be divided among the devices, or the table's images or classes are not those
                that the model is trained for.
        """
        size = batch_size or self.order.batch_size
        self.topology.check_batch_size(size, "eval.batch_size")
        check_comparable(table, self.table, self.data)
        step = make_eval_step(objective, self.topology)
        return Evaluator(step, lambda: self.eval_batches(table, size), len(table), extra)

    def __str__(self) -> str:
        rows = [f"  {device}: rows {rows.start}:{rows.stop}" for device, rows in self.slices]
        count = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        head = f"RunSetup: {count:,} parameters, {len(self.table):,} examples, global batch {self.order.batch_size}"
        return "\n".join([f"{head} over {self.topology.num_devices} devices", *rows])


def prepare(
    model: Any,
    table: Table,
    optimizer: optax.GradientTransformation,
    topology: Topology,
    order: SampleOrder,
    *,
    data: DataConfig,
    dtype: Any = "float32",
    epochs: float = 1,
    compiler_options: Mapping[str, str] | None = None,
) -> RunSetup:
    """Put a run together and initialize its state.

    Args:
        model: anything that `jaxddp.models.adapt.adapt` takes.
        order: of the table; its seed is also that of initialization and augmentation.
        dtype: that of the images given to the model.
        compiler_options: XLA's for the training step, as `jaxddp.engine.compiler_options` has tried them.

    Raises:
        InputError: a batch that the devices cannot share, augmentation out of bounds, processes that hold different
            data, a set that cannot be kept on the devices (see `check_cacheable`), and what `adapt`
            refuses.
    """
    preprocess = make_preprocess(table, order, data, topology, dtype)
    substitutes, images = make_substitutes(table, data), None
    if data.cache == "device":
        check_cacheable(table, data)
        images = functools.cache(functools.partial(load_images, table, data, topology, substitutes))
    agree({"training data": table.fingerprint, "batch size": str(order.batch_size), "seed": str(order.seed)})
    topology.connect()
    adapted = adapt(model)
    state = create_state(adapted, optimizer, image_shape(table, data), seed=order.seed, topology=topology)
    return RunSetup(
        *(topology, adapted, optimizer, table, order, data, preprocess, state, epochs, images, substitutes),
        compiler_options=compiler_options or {},
    )


def train(
    setup: RunSetup,
    objective: Objective,
    plan: Plan,
    *,
    evaluator: Evaluator | None = None,
    checkpoints: Checkpoints | None = None,
    resume_step: int | None = None,
    listeners: Sequence[Listener] = (),
    learning_rate: optax.Schedule | None = None,
    schedule: optax.Schedule | None = None,
    should_stop: Callable[[int], bool] = lambda step: False,
    profile: Path | None = None,
) -> TrainState:
    """Train a setup to the plan's end; see `jaxddp.training.loop.fit` for the order of operations.

    Args:
        resume_step: restore this checkpoint first.
        learning_rate: what the optimizer follows, to be shown.
        schedule: multiplies the optimizer's updates, 0 for the first step.
        profile: where the trace that the plan asks for goes; process 0 alone writes one.
    """
    state, progress, validated = setup.state, None, True
    if checkpoints and resume_step is not None:
        state, progress = checkpoints.restore(resume_step, state)
        # As process 0 sees it: what it wrote last may not have come to every host.
        validated = exchange("validated", str(checkpoints.is_validated(resume_step)))[0] == str(True)
    program, chunks = setup.program(objective, plan, schedule)
    first = setup.topology.process_index == 0
    start = RunStart(
        start_step=int(state.step),
        total_steps=plan.total_steps,
        batch_size=plan.batch_size,
        num_examples=plan.num_examples,
        devices=setup.topology.num_devices,
        processes=setup.topology.process_count,
        device_kind=setup.topology.device_kind,
        params=state.params,
        traced=plan.traced(int(state.step)) if plan.profile and profile else None,
        workdir=checkpoints.directory.parent if checkpoints else None,
    )
    return fit(
        program,
        state,
        chunks,
        plan=plan,
        start=start,
        evaluator=evaluator,
        checkpoints=checkpoints,
        # What one process prints and writes, all would print and write.
        listeners=listeners if first else (),
        learning_rate=learning_rate,
        progress=progress,
        validated=validated,
        should_stop=should_stop,
        usage=Usage(program, setup.topology, plan.batch_size),
        profile=profile if first else None,
    )
