"""The compiled programs of a recipe. The state, the random key and the batches are their arguments."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Views
from jaxddp.core.errors import InputError, Key
from jaxddp.data.batch import Batch
from jaxddp.data.labels import LabelKind
from jaxddp.data.source import Source
from jaxddp.engine.example_loss import ExampleLoss, Loss, example_loss
from jaxddp.engine.gradients import Gradients
from jaxddp.engine.groups.group_mesh import GroupMesh
from jaxddp.engine.groups.outer_step import Between, OuterStep, make_mean_state, make_stack
from jaxddp.engine.initial_state import make_init
from jaxddp.engine.objective import MetricSums, Objective
from jaxddp.engine.parts.part import Follow, Part, make_follow
from jaxddp.engine.predictions import make_classify
from jaxddp.engine.programs import Program, gather_batch, make_resident_eval, make_resident_steps, steps_in
from jaxddp.engine.self_test import SelfTest
from jaxddp.engine.sharded.sharded_state import make_gather
from jaxddp.engine.sharded.sharded_step import make_sharded_step
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import Phases, TrainStep, make_eval_step, make_local_eval_step, make_local_step, make_train_step
from jaxddp.engine.unequal.unequal_step import UnequalProgram
from jaxddp.mesh import Topology
from jaxddp.models.interface import Model
from jaxddp.registry import METRICS
from jaxddp.setup.layout import Layout
from jaxddp.setup.recipe import Recipe
from jaxddp.training.evaluation import Evaluator, Measure

_SETTINGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable"),
    "jax_numpy_dtype_promotion",
)


def settings() -> dict[str, str]:
    """Return the settings of JAX that affect results."""
    return {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}


class CompiledPrograms:
    """A cache of compiled programs, keyed by the identity of the objects that they are made of.

    The cache keeps the `max_programs` most recently used programs. Each program is compiled on first use.
    """

    def __init__(self, max_programs: int = 16) -> None:
        self._max_programs = max_programs
        self._programs: list[tuple[tuple[str, dict[str, str]], tuple[Any, ...], Any]] = []

    def loss(self, function: Loss, labels: LabelKind) -> ExampleLoss:
        """Return the loss of each example; see `example_loss`."""
        return self._cached("loss", (function,), lambda: example_loss(function, labels))

    def init(
        self,
        network: Model,
        recipe: Recipe,
        weights: Mapping[str, np.ndarray],
    ) -> Callable[[jax.Array], TrainState]:
        """Return the function (key) -> initial state; see `make_init`.

        Args:
            network: the model of the recipe, adapted to the platform.
            weights: arrays by path, which replace freshly initialized arrays.
        """
        parts, transform, topology = recipe.parts, recipe.initialize, recipe.topology
        image_shape, gradients = recipe.layout.training_data.image_shape, recipe.layout.gradients
        options = {"parts": parts, "transform": transform, "gradients": gradients}
        init = self._cached(
            f"init {image_shape}, sharded: {gradients.shards_state}",
            (network, recipe.optimizer, parts, transform, topology),
            lambda: make_init(network, recipe.optimizer, image_shape, topology, **options),
        )
        return lambda key: init(key, topology.replicate(dict(weights)))

    def train(self, objective: Objective, recipe: Recipe, *, resident: bool) -> Program:
        """Return the program of the training steps, on batches or on images that are `resident` on the devices."""
        topology, layout, gradients = recipe.topology, recipe.layout, recipe.layout.gradients
        options = recipe.resources.compiler_options

        def make() -> Program:
            if gradients.sizes:
                return unequal_program(objective, recipe, gradients.sizes, resident=resident)
            one_step = _step(objective, recipe)
            keywords = {"sharded": gradients.shards_state, "groups": layout.groups, "compiler_options": options}
            if resident:
                return Program(make_resident_steps(one_step, topology, **keywords), steps_in)
            return Program(make_train_step(one_step, topology, **keywords))

        pieces = (recipe.objective, recipe.optimizer, recipe.schedule, recipe.parts, topology, options)
        outer = None if layout.groups is None else layout.groups.outer
        kind = f"{'resident steps' if resident else 'step'}, {gradients}, {outer}"
        return self._cached(kind, (*_pieces(objective), *pieces), make)

    def self_test(self, objective: Objective, recipe: Recipe, *, resident: bool) -> SelfTest | None:
        """Return the self-test of the gradient; None with one device, or if the config disables it. See `SelfTest`."""
        topology, gradients = recipe.topology, recipe.layout.gradients
        mode = recipe.config.parallel.self_test
        if topology.num_devices == 1 or mode == "never":
            return None

        def first_batch(first: Any, columns: Any, key: Any = None) -> Batch:
            return gather_batch(first, columns, 0) if resident else first

        kind = f"{mode} self-test of {'resident steps' if resident else 'a step'}, {gradients}"
        # The self-test compares gradients, and metrics have none.
        plain, pieces = dataclasses.replace(objective, metrics={}), (*_pieces(objective), recipe.objective, topology)
        return self._cached(
            kind, pieces, lambda: SelfTest(recipe.minimized(plain), gradients, topology, first_batch, mode)
        )

    def whole(self, layout: Layout, topology: Topology, *, opt_state: bool) -> Between:
        """Return the function that gathers a state, or averages the states of groups. Another state stays as it is.

        See `make_gather` and `make_mean_state`, also for `opt_state`.
        """
        groups, gradients = layout.groups, layout.gradients
        if groups is not None:
            kind = f"mean state, {gradients}, optimizer: {opt_state}"
            return self._cached(kind, (topology,), lambda: make_mean_state(groups, gradients, opt_state=opt_state))
        if not gradients.shards_state:
            return lambda state: state
        return self._cached("whole state", (topology,), lambda: make_gather(topology))

    def stack(self, groups: GroupMesh, gradients: Gradients) -> Between:
        """Return the function that gives every group the same state; see `make_stack`."""
        kind = f"stack, {groups.outer}, {gradients}"
        return self._cached(kind, (groups.topology,), lambda: make_stack(groups, gradients))

    def outer_step(self, recipe: Recipe, groups: GroupMesh) -> OuterStep:
        """Return the outer step of the states of a recipe."""
        gradients, pieces = recipe.layout.gradients, (recipe.model, recipe.optimizer, recipe.parts)
        kind = f"outer step, {groups.outer}, {gradients}"
        return self._cached(kind, (*pieces, groups.topology), lambda: OuterStep(groups, gradients))

    def follow(self, parts: tuple[Part, ...], topology: Topology, groups: GroupMesh | None = None) -> Follow:
        """Return the function that passes validations to the parts of the step; see `make_follow`."""
        count = None if groups is None else groups.count
        return self._cached(f"follow, {count} groups", (parts, topology), lambda: make_follow(parts, topology, groups))

    def evaluate(self, objective: Objective, topology: Topology, *, resident: bool) -> Callable[..., MetricSums]:
        """Return the program of evaluation, on batches or on images that are `resident` on the devices."""

        def make() -> Callable[..., MetricSums]:
            make_eval = make_resident_eval if resident else make_eval_step
            return make_eval(make_local_eval_step(objective), topology)

        kind = f"{'resident eval' if resident else 'eval'} of {objective.views}"
        return self._cached(kind, (*_pieces(objective), topology), make)

    def metrics(self, recipe_metrics: Mapping[str, Any], names: tuple[str, ...]) -> Mapping[str, Any]:
        """Return a recipe's metrics together with the built-in metrics `names`."""
        if not names:
            return recipe_metrics
        return self._cached(
            f"metrics {names}",
            (recipe_metrics,),
            lambda: {name: METRICS.get(name) for name in names} | dict(recipe_metrics),
        )

    def classify(self, objective: Objective, topology: Topology) -> Callable[[TrainState, Batch], Any]:
        """Return the program of prediction; see `make_classify`."""
        kind = f"classify by {objective.views}"
        return self._cached(kind, (*_pieces(objective), topology), lambda: make_classify(objective, topology))

    def _cached(self, kind: str, pieces: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        kind_and_settings = (kind, settings())
        for index, (cached_kind, cached_pieces, program) in enumerate(self._programs):
            # Compare identities: two objects of a user may be equal and still compute different values.
            if cached_kind == kind_and_settings and all(map(operator.is_, cached_pieces, pieces)):
                self._programs.append(self._programs.pop(index))
                return program
        program = make()
        self._programs = [*self._programs[1 - self._max_programs :], (kind_and_settings, pieces, program)]
        return program


def seeded_step(objective: Objective, recipe: Recipe, seed: int) -> TrainStep:
    """Return a training step (state, batch) with a constant seed; see `make_train_step`."""
    topology, layout, options = recipe.topology, recipe.layout, recipe.resources.compiler_options
    if layout.groups is not None:
        raise InputError(
            Key("train.sync_every"), ": a step of a loop of your own has no groups of devices", advice="leave it out"
        )
    if layout.gradients.sizes:
        program, key = unequal_program(objective, recipe, layout.gradients.sizes), jax.random.key(seed)
        return lambda state, batch: program(state, batch, topology.replicate(key))
    one_step = _step(objective, recipe)

    @functools.wraps(one_step)
    def seeded_step_of(state: TrainState, batch: Batch, _: None) -> tuple[TrainState, MetricSums]:
        return one_step(state, batch, jax.random.key(seed))

    return make_train_step(seeded_step_of, topology, sharded=layout.gradients.shards_state, compiler_options=options)


def unequal_program(
    objective: Objective, recipe: Recipe, sizes: tuple[int, ...], *, resident: bool = False
) -> UnequalProgram:
    """Return the program of a training step whose devices have slices of these sizes; see `CompiledPrograms.train`."""
    topology, gradients, minimized = recipe.topology, recipe.layout.gradients, recipe.minimized(objective)
    phases = Phases(minimized, recipe.optimizer, recipe.schedule, recipe.parts, gradients, topology.num_devices)

    def read(first: Any, columns: Any = None) -> Batch:
        return gather_batch(first, columns, 0) if resident else first

    return UnequalProgram(phases, topology, sizes, read, recipe.resources.compiler_options)


def _step(objective: Objective, recipe: Recipe) -> TrainStep:
    """Return one step, of one device or of all devices; see `make_train_step`."""
    topology, groups, gradients = recipe.topology, recipe.layout.groups, recipe.layout.gradients
    make_step = make_sharded_step if gradients.shards_state else make_local_step
    one_step = make_step(
        recipe.minimized(objective),
        recipe.optimizer,
        topology if groups is None else groups.first,
        schedule=recipe.schedule,
        parts=recipe.parts,
        gradients=gradients,
    )
    return one_step if groups is None else groups.one_step(one_step)


def _pieces(objective: Objective) -> tuple[Any, ...]:
    return objective.model, objective.loss, objective.preprocess, objective.metrics


@dataclass(frozen=True)
class Classifier:
    """A network with the loss and the metrics of evaluation.

    Attributes:
        model: the network, adapted to the platform; see `jaxddp.models.adapt.for_platform`.
        loss: the loss without label smoothing.
        metrics: metrics in addition to the loss, by name.
        preprocess: turns pixels into the network's input.
        views: the views of an image whose logits are averaged, see `eval.views`.
        topology: the devices.
        programs: the cache of compiled programs.
    """

    model: Model
    loss: ExampleLoss
    metrics: Mapping[str, Any]
    preprocess: Preprocess
    views: Views
    topology: Topology
    programs: CompiledPrograms = field(default_factory=CompiledPrograms)

    def objective(self, metrics: Mapping[str, Any] | None = None) -> Objective:
        """Return the objective that measures a batch. `metrics` replaces the classifier's metrics if it is given."""
        return Objective(
            self.model, self.loss, self.preprocess, self.metrics if metrics is None else metrics, self.views
        )

    def evaluator(
        self,
        source: Source,
        batches: Callable[[], Iterator[tuple[Any, ...]]],
        metrics: Mapping[str, Any] | None = None,
        extra: Sequence[Measure] = (),
        *,
        resident: bool = False,
    ) -> Evaluator:
        """Return the evaluator of a labelled source, which measures each example once.

        Args:
            batches: returns an iterator over the source's batches on the devices. Each batch is in a tuple.
            metrics: metrics that replace the classifier's.
            extra: functions of the state that return further metrics.
            resident: whether the images are on the devices. If so, each tuple is (images, batches without images).
        """
        objective = self.objective(metrics)
        step = self.programs.evaluate(objective, self.topology, resident=resident)
        return Evaluator(step, batches, len(source), extra, objective.metrics)

    def classify(self) -> Callable[..., Any]:
        """Return the function (state, batch) -> predictions; see `jaxddp.engine.predictions.make_classify`."""
        return self.programs.classify(self.objective(), self.topology)
