"""A training made ready: a recipe laid out over its resources. The terminal and notebooks share all of it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import optax

from jaxddp.augment.mixing import check_mixing
from jaxddp.augment.preprocess import Preprocess, check_augmentation
from jaxddp.config import DataConfig
from jaxddp.data.batch import Batch
from jaxddp.data.order import SampleOrder
from jaxddp.data.source import Source, check_labelled
from jaxddp.engine.averaging import Averaging
from jaxddp.engine.loss import Loss, example_loss
from jaxddp.engine.objective import Metric, Objective
from jaxddp.engine.resident_steps import loops_are_slow, make_resident_steps
from jaxddp.engine.state import TrainState, create_state
from jaxddp.engine.step import Program, TrainStep, make_eval_step, make_local_step, make_train_step
from jaxddp.errors import InputError
from jaxddp.experiment.feed import LONGEST_CHUNK, Feed
from jaxddp.experiment.identity import checksums, identity
from jaxddp.experiment.recipe import Recipe
from jaxddp.experiment.resources import Resources, check_comparable
from jaxddp.experiment.session import Session
from jaxddp.job.membership import agree
from jaxddp.mesh import Device, Topology
from jaxddp.models.adapt import for_platform
from jaxddp.models.protocol import Model
from jaxddp.training.evaluation import Evaluator
from jaxddp.training.plan import Plan
from jaxddp.training.run import Chunk, Chunks, Run

_SETTINGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable"),
    "jax_numpy_dtype_promotion",
)
"""JAX's settings that decide numbers: a program of other types would wait for that of another process."""


@dataclass(frozen=True)
class RunSetup:
    """A recipe on its resources, initialized. Everything else of a run follows from these.

    The model is the recipe's, as it is quickest on these devices. The state is replicated on every device;
    `dataclasses.replace(setup, state=trained)` goes on from a trained one.
    """

    recipe: Recipe
    resources: Resources
    model: Model = field(repr=False)
    feed: Feed = field(repr=False)
    preprocess: Preprocess = field(repr=False)
    state: TrainState = field(repr=False)

    @property
    def topology(self) -> Topology:
        return self.resources.topology

    @property
    def table(self) -> Source:
        """What is trained on."""
        return self.resources.train

    @property
    def data(self) -> DataConfig:
        return self.recipe.config.data

    @property
    def optimizer(self) -> optax.GradientTransformation:
        return self.recipe.optimizer

    @property
    def order(self) -> SampleOrder:
        """Which rows of the training data make up each global batch."""
        return self.feed.order

    @property
    def slices(self) -> list[tuple[Device, slice]]:
        """Per device, in mesh order, the rows of a global batch that it gets."""
        return self.topology.slices(self.order.batch_size)

    @cached_property
    def plan(self) -> Plan:
        """How long the run is, and when it logs, validates and saves."""
        return Plan.of(self.recipe.config, len(self.table))

    @cached_property
    def objective(self) -> Objective:
        """What training minimizes and measures."""
        return Objective(self.model, self.recipe.loss, self.preprocess, self.recipe.metrics)

    def eval_objective(self, metrics: Mapping[str, Metric] | None = None) -> Objective:
        """What evaluation measures; the recipe's metrics where none are given."""
        chosen = self.recipe.metrics if metrics is None else metrics
        return Objective(self.model, self.recipe.eval_loss, self.preprocess, chosen)

    def with_loss(self, loss: Loss) -> "RunSetup":
        """The same setup with another loss, which evaluation measures too. Raises: as `example_loss`."""
        if loss is self.recipe.loss.function is self.recipe.eval_loss.function:
            return self
        taken_apart = example_loss(loss, self.table.num_classes)
        return dataclasses.replace(
            self, recipe=dataclasses.replace(self.recipe, loss=taken_apart, eval_loss=taken_apart)
        )

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The placed training batches of steps `start` to `stop - 1`; nothing before `start` is read."""
        return self.feed.batches(start, stop)

    def step(self) -> TrainStep:
        """One optimizer step on a placed batch, compiled on first use; see `make_train_step`."""
        return make_train_step(self._local_step(), self.topology, compiler_options=self.resources.compiler_options)

    def _local_step(self) -> TrainStep:
        recipe = self.recipe
        return make_local_step(
            self.objective,
            recipe.optimizer,
            self.topology,
            seed=self.order.seed,
            schedule=recipe.schedule,
            parts=recipe.parts,
            averaging=Averaging.of(recipe.config, self.topology),
        )

    def program(self) -> tuple[Program, Chunks]:
        """The program of the steps, and what feeds it: placed batches, or rows of images on the devices."""
        if self.data.cache == "none":
            total = self.plan.total_steps
            return Program(self.step()), lambda done: (Chunk(1, (batch,)) for batch in self.batches(done, total))
        slow = loops_are_slow(self.objective, self.state, self.feed.images.shape[1:], self.topology)
        length, options = 1 if slow else LONGEST_CHUNK, self.resources.compiler_options
        steps = make_resident_steps(self._local_step(), self.topology, length=length, compiler_options=options)
        return Program(steps), lambda done: self.feed.resident_chunks(self.plan.chunks(done, length), length)

    def evaluator(
        self,
        source: Source,
        batch_size: int | None = None,
        metrics: Mapping[str, Metric] | None = None,
        extra: Sequence[Callable[[TrainState], Mapping[str, float]]] = (),
    ) -> Evaluator:
        """Measures a state over a source, in batches of `batch_size`, else as in training. Raises: InputError."""
        size = batch_size or self.order.batch_size
        self.topology.check_batch_size(size, "eval.batch_size")
        check_labelled(source, "validation data")
        check_comparable(source, self.table, self.data)
        step = make_eval_step(self.eval_objective(metrics), self.topology)
        return Evaluator(step, lambda: self.feed.eval_batches(source, size), len(source), extra)

    def identity(self) -> dict[str, str]:
        """What tells the recipe's objects from others; see `jaxddp.experiment.identity`."""
        shape = self.table.image_shape(self.data)
        return identity(self.recipe, self.state, self.table.num_classes, shape)

    def run(
        self,
        session: Session | None = None,
        *,
        listeners: Sequence[Any] = (),
        evaluators: Sequence[Callable[[TrainState], Mapping[str, float]]] = (),
        objects: Mapping[str, str] | None = None,
    ) -> Run:
        """All that `jaxddp.training.loop.fit` takes. The run consumes this setup's state.

        Args:
            session: the work directory that the run resumes and saves in; None keeps nothing.
            evaluators: functions of the state, whose metrics join each evaluation's.
            objects: the recipe's identity, where it came from Python and not from files that were compared already. All
                processes must have the same.
        """
        val, config = self.resources.val, self.recipe.config
        if self.topology.process_count > 1:
            agree({**(objects or {}), **checksums(self.state), "the number of steps": str(self.plan.total_steps)})
        evaluator = None if val is None else self.evaluator(val, config.eval.batch_size, extra=evaluators)
        (program, chunks), rate = self.program(), self.recipe.learning_rate
        run = Run(
            self.plan, self.topology, self.state, program, chunks, evaluator, listeners=listeners, learning_rate=rate
        )
        return run if session is None else session.joined(run)

    def __str__(self) -> str:
        rows = [f"  {device}: rows {rows.start}:{rows.stop}" for device, rows in self.slices]
        count = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        head = f"RunSetup: {count:,} parameters, {len(self.table):,} examples, global batch {self.order.batch_size}"
        return "\n".join([f"{head} over {self.topology.num_devices} devices", *rows])


def prepare(recipe: Recipe, resources: Resources) -> RunSetup:
    """Lay a recipe out over its resources and initialize its state. Raises: InputError; as the functions below."""
    return initialize(recipe, resources, make_feed(recipe, resources), make_preprocess(recipe, resources))


def initialize(recipe: Recipe, resources: Resources, feed: Feed, preprocess: Preprocess) -> RunSetup:
    """The last part of `prepare`: what compiles. Raises: InputError; the processes hold different data."""
    order, source, topology = feed.order, feed.source, resources.topology
    agree({"training data": source.fingerprint, "batch size": str(order.batch_size), "seed": str(order.seed)})
    settings = {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}
    settings["gradients travel as"] = str(Averaging.of(recipe.config, resources.topology))
    agree(settings | {"XLA's options": str(sorted(resources.compiler_options.items()))})
    topology.connect()
    model = for_platform(recipe.model, topology.platform)
    shape, parts, transform = source.image_shape(feed.data), recipe.parts, recipe.initialize
    state = create_state(
        model, recipe.optimizer, shape, seed=order.seed, topology=topology, parts=parts, transform=transform
    )
    return RunSetup(recipe, resources, model, feed, preprocess, state)


def make_feed(recipe: Recipe, resources: Resources) -> Feed:
    """The training data over the devices. Raises: InputError; they cannot share a batch, or keep the set."""
    config, source = recipe.config, resources.train
    check_labelled(source, "training data")
    resources.topology.check_batch_size(config.train.batch_size)
    if config.data.cache == "device":
        source.check_resident(config.data)
    order = SampleOrder(len(source), config.train.batch_size, config.seed)
    return Feed(source, order, config.data, resources.topology, source.substitutes(config.data))


def make_preprocess(recipe: Recipe, resources: Resources) -> Preprocess:
    """What is done to the images on the devices. Raises: InputError; augmentation, mean or std do not fit them."""
    config, data = recipe.config, recipe.config.data
    shape = resources.train.image_shape(data)
    if not len(data.mean) == len(data.std) >= shape[-1]:
        raise InputError(
            f"data.mean has {len(data.mean)} values, data.std {len(data.std)}, and images of {shape} have {shape[-1]} "
            "channels; give a value for each channel"
        )
    dtype = config.train.precision or "float32"
    preprocess = Preprocess(data.mean, data.std, data.augment, config.seed, dtype, recipe.augmentation)
    check_augmentation(preprocess, shape)
    check_mixing(data.augment, config.train.batch_size, resources.topology.num_devices)
    return preprocess
