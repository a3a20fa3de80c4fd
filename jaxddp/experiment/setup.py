"""A training made ready: a recipe laid out over its resources. The terminal and notebooks share all of it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import optax

import jaxddp.job.progress as progress
from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import DataConfig
from jaxddp.data.batch import Batch
from jaxddp.data.division import Division
from jaxddp.data.labels import is_multi_label
from jaxddp.data.order import SampleOrder
from jaxddp.data.source import Source, check_labelled
from jaxddp.engine.gradients import Gradients
from jaxddp.engine.loss import Loss
from jaxddp.engine.objective import Objective
from jaxddp.engine.replicas import Replicas
from jaxddp.engine.resident_steps import loops_are_slow
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import Program, TrainStep
from jaxddp.experiment.chosen_metrics import check_wanted
from jaxddp.experiment.feed import LONGEST_CHUNK, Feed, no_larger
from jaxddp.experiment.identity import checksums, identity
from jaxddp.experiment.judged import judgement_of
from jaxddp.experiment.objective_identity import objective_identity
from jaxddp.experiment.programs import Programs, seeded_step
from jaxddp.experiment.recipe import Recipe
from jaxddp.experiment.resources import Resources, check_comparable, tell_unseen
from jaxddp.experiment.session import Session
from jaxddp.experiment.signature import Signature
from jaxddp.experiment.suspects import suspects
from jaxddp.job.membership import agree, from_first, is_first
from jaxddp.mesh import Device, Topology
from jaxddp.models.protocol import Model
from jaxddp.recipe_file import RUN_ID
from jaxddp.training.evaluation import Evaluator
from jaxddp.training.listeners.slow_processes import SlowProcesses
from jaxddp.training.plan import Plan
from jaxddp.training.predictor import Predictor
from jaxddp.training.run import Chunk, Chunks, Run
from jaxddp.wording import counted


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
    like: TrainState = field(repr=False)
    """What a state of it consists of: the shape and dtype of each array."""
    programs: Programs = field(default_factory=Programs, repr=False)

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
    def division(self) -> Division:
        """How a batch is divided."""
        config = self.recipe.config
        return Division.of(config, Gradients.of(config, self.topology).shares(self.topology))

    @property
    def order(self) -> SampleOrder:
        """Which rows of the training data make up each global batch."""
        return self.feed.order

    @cached_property
    def key(self) -> jax.Array:
        """The random key of the seed, on every device."""
        return self.topology.replicate(jax.random.key(self.order.seed))

    @property
    def slices(self) -> list[tuple[Device, slice]]:
        """Per device, in mesh order, the rows of a global batch that it gets."""
        return self.topology.slices(self.order.batch_size)

    @cached_property
    def plan(self) -> Plan:
        """How long the run is, and when it logs, validates and saves."""
        return Plan.of(self.recipe.config, len(self.table))

    @property
    def validated(self) -> Source | None:
        """What is validated on; None where validation is switched off."""
        return self.resources.val if self.plan.evaluate.examples else None

    @cached_property
    def objective(self) -> Objective:
        """What training minimizes and measures."""
        return Objective(self.model, self.recipe.loss, self.preprocess, self.recipe.metrics)

    def eval_objective(self, metrics: Mapping[str, Any] | None = None) -> Objective:
        """What evaluation measures; the recipe's metrics where none are given."""
        chosen = self.recipe.metrics if metrics is None else metrics
        views = self.recipe.config.eval.views
        return Objective(self.model, self.recipe.eval_loss, self.preprocess, chosen, views)

    def with_loss(self, loss: Loss) -> "RunSetup":
        """The same setup with another loss, which evaluation measures too. Raises: as `example_loss`."""
        if loss is self.recipe.loss.function is self.recipe.eval_loss.function:
            return self
        taken_apart = self.programs.loss(loss, self.table.num_classes, multi_label=is_multi_label(self.table))
        return dataclasses.replace(
            self, recipe=dataclasses.replace(self.recipe, loss=taken_apart, eval_loss=taken_apart)
        )

    def with_seed(self, seed: int) -> "RunSetup":
        """The same setup with another seed, and so another initial state, order, augmentation and dropout.

        A run of it gives the same bits as one that is prepared with this seed. It compiles nothing that a run of this
        setup has compiled, and images that lie on the devices stay there. The objects of the recipe stay, too: a model
        or an optimizer that a recipe file made of its config's seed is still that one.

        Raises:
            InputError: a seed that is out of range, or another one in another process.
        """
        config = self.recipe.config.replace(seed=seed)
        agree({"seed": str(seed)})
        recipe, feed = dataclasses.replace(self.recipe, config=config), self.feed.with_seed(seed)
        init = self.programs.init(self.model, recipe, self.table.image_shape(self.data), self.topology)
        made = dataclasses.replace(self, recipe=recipe, feed=feed)
        return dataclasses.replace(made, state=init(made.key))

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The placed training batches of steps `start` to `stop - 1`; nothing before `start` is read."""
        return self.feed.batches(start, stop)

    def step(self) -> TrainStep:
        """One optimizer step on a placed batch, compiled on first use, with the seed in it; see `make_train_step`."""
        return seeded_step(self.objective, self.recipe, self.resources, self.order.seed)

    def program(self) -> tuple[Program, Chunks]:
        """The program of the steps, and what feeds it: placed batches, or rows of images on the devices."""
        key, plan, resident = self.key, self.plan, self.data.cache == "device"
        program = self.programs.train(self.objective, self.recipe, self.resources, resident=resident)
        if not resident:
            return program, lambda done: (Chunk(1, (batch, key)) for batch in self.batches(done, plan.total_steps))
        length, growth = plan.chunk_length(self._longest_chunk), self.feed.growth
        cuts = [] if growth is None else growth.changes(plan.total_steps)
        return program, lambda done: self.feed.resident_chunks(plan.chunks(done, length, cuts), key)

    @cached_property
    def _longest_chunk(self) -> int:
        shape = self.table.image_shape(self.data)
        return 1 if loops_are_slow(self.objective, self.state, shape, self.topology) else LONGEST_CHUNK

    def evaluator(
        self,
        source: Source,
        batch_size: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        extra: Sequence[Callable[[TrainState], Mapping[str, float]]] = (),
        *,
        resident: bool = False,
    ) -> Evaluator:
        """Measures a state over a source, in batches of `batch_size`, else as in training. Raises: InputError.

        The images are decoded anew at each measurement, or once, if they are to be `resident` on the devices.
        """
        size = batch_size or self.order.batch_size
        self.topology.check_batch_size(size, "eval.batch_size")
        size = no_larger(size, source, self.topology)
        check_labelled(source, "validation data")
        check_comparable(source, self.table, self.data)
        objective = self.eval_objective(metrics)
        step, shown = self.programs.evaluate(objective, self.topology, resident=resident), objective.metrics
        if resident:
            longest = self._longest_chunk
            return Evaluator(step, lambda: self.feed.resident_eval(source, size, longest), len(source), extra, shown)
        batches = self.feed.eval_batches
        return Evaluator(step, lambda: ((batch,) for batch in batches(source, size)), len(source), extra, shown)

    def predictor(self, count: int) -> Predictor | None:
        """Predicts `count` images that are validated on, of each class its share; None where there are none."""
        # A picture shows one label and one prediction.
        if self.validated is None or not count or is_multi_label(self.table):
            return None
        program = self.programs.classify(self.eval_objective(), self.topology)
        most = self.recipe.config.eval.batch_size
        return Predictor(program, self.validated.take(count), self.data.of_evaluation, self.topology, most)

    def identity(self) -> dict[str, str]:
        """What tells the recipe's objects from others; see `jaxddp.experiment.identity`."""
        shape = self.table.image_shape(self.data)
        found = identity(self.recipe, self.state, self.table.num_classes, shape)
        return found | objective_identity(self.recipe, self.objective, self.state, self.feed.abstract_batch())

    def run(
        self,
        session: Session | None = None,
        *,
        listeners: Sequence[Any] = (),
        evaluators: Sequence[Callable[[TrainState], Mapping[str, float]]] = (),
        objects: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Run:
        """All that `jaxddp.training.loop.fit` takes. The run consumes this setup's state.

        Args:
            session: the work directory that the run resumes and saves in; None keeps nothing.
            evaluators: functions of the state, whose metrics join each evaluation's.
            objects: the recipe's identity, where it came from Python and not from files that were compared already. All
                processes must have the same.
            config: what config.json says of the run, for the listeners.
        """
        val, eval_batch_size = self.validated, self.recipe.config.eval.batch_size
        if self.topology.process_count > 1:
            agree({**(objects or {}), **checksums(self.state), "the number of steps": str(self.plan.total_steps)})
        evaluator, resident = None, self.data.cache == "device"
        if val is not None:
            check_wanted(listeners, multi_label=is_multi_label(self.table))
            metrics = self.programs.metrics(self.recipe.metrics, _wanted_metrics(listeners))
            evaluator = self.evaluator(val, eval_batch_size, metrics, evaluators, resident=resident)
            tell_unseen(val, self.table)
        if resident:
            # Before anything is compiled: both have to fit, and no image may be damaged.
            self.feed.place(self.validated)
        judgement = judgement_of(self.recipe, self.resources, measures_more=bool(evaluators))
        with progress.phase("compile", "preparing the step"):
            (program, chunks), rate = self.program(), self.recipe.learning_rate
            # What the step refuses is said before a run begins that somebody hears of.
            feed = next(chunks(0)).feed if resident else (self.feed.abstract_batch(), self.key)
            program.check(self.state, *feed)
        blame = functools.partial(suspects, objective=self.objective, feed=self.feed, key=self.key)
        several = self.topology.num_devices > 1
        # Of the listeners, those of the first process count, and all have to predict.
        most = from_first("predictions", lambda: str(max(map(_wanted_predictions, listeners), default=0)))
        run = Run(
            *(self.plan, self.topology, self.state, program, chunks, self.division, evaluator),
            predictor=self.predictor(int(most)),
            listeners=[*listeners, SlowProcesses()] if self.topology.process_count > 1 else listeners,
            learning_rate=rate,
            suspects=blame,
            self_test=self.programs.self_test(self.objective, self.recipe, self.topology, resident=resident),
            replicas=Replicas(self.topology) if several and self.plan.replicas.examples else None,
            config=config or {},
            growing=self.feed.growing(self.plan.total_steps),
            class_names=self.table.class_names,
            judgement=judgement,
            follow=self.programs.follow(self.recipe.parts, self.topology),
            parts=self.recipe.parts,
        )
        if session is None:
            return run
        if is_first():
            Signature.of(self.table, self.data).write(session.directory, (config or {}).get(RUN_ID))
        return session.joined(run)

    def __repr__(self) -> str:
        count = counted(sum(leaf.size for leaf in jax.tree.leaves(self.like.params)), "parameter")
        batch = f"global batch {self.order.batch_size:,} over {counted(self.topology.num_devices, 'device')}"
        return f"RunSetup({count}, {counted(len(self.table), 'example')}, {batch})"

    def __str__(self) -> str:
        """Which device gets which rows of a batch, too."""
        return "\n".join([repr(self), *(f"  {device}: rows {rows.start}:{rows.stop}" for device, rows in self.slices)])


def _wanted_metrics(listeners: Sequence[Any]) -> tuple[str, ...]:
    """As those of the first process want them."""
    wanted = {name for listener in listeners for name in getattr(listener, "wants_metrics", ())}
    return tuple(filter(None, from_first("metrics of listeners", lambda: ",".join(sorted(wanted))).split(",")))


def _wanted_predictions(listener: Any) -> int:
    return getattr(listener, "wants_predictions", 0)
