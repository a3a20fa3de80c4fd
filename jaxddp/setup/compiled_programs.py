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
from jaxddp.config.registry import METRICS
from jaxddp.data.batch import Batch
from jaxddp.data.labels import LabelKind
from jaxddp.data.source import Source
from jaxddp.engine.example_loss import ExampleLoss, Loss, example_loss
from jaxddp.engine.initial_state import make_init
from jaxddp.engine.objective import MetricSums, Objective
from jaxddp.engine.parts.part import Follow, Part
from jaxddp.engine.predictions import make_classify
from jaxddp.engine.programs import Program, TrainStep, gather_batch, make_eval_step
from jaxddp.engine.self_test import SelfTest
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Way
from jaxddp.mesh import Topology
from jaxddp.models.interface import Model
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
        image_shape, way = recipe.layout.training_data.image_shape, recipe.layout.way
        options = {"parts": parts, "transform": transform, "way": way}
        init = self._cached(
            f"init {image_shape}",
            (network, recipe.optimizer, parts, transform, topology, type(way).jit_init),
            lambda: make_init(network, recipe.optimizer, image_shape, topology, **options),
        )
        return lambda key: init(key, topology.replicate(dict(weights)))

    def train(self, objective: Objective, recipe: Recipe, *, resident: bool) -> Program:
        """Return the program of the training steps, on batches or on images that are `resident` on the devices."""
        topology, way, options = recipe.topology, self.way(recipe.layout.way), recipe.resources.compiler_options

        def make() -> Program:
            return way.program(step_phases(objective, recipe), resident=resident, compiler_options=options)

        pieces = (recipe.objective, recipe.optimizer, recipe.schedule, recipe.parts, topology, options)
        return self._cached(f"{'resident steps' if resident else 'step'}, {way}", (*_pieces(objective), *pieces), make)

    def self_test(self, objective: Objective, recipe: Recipe, *, resident: bool) -> SelfTest | None:
        """Return the self-test of the gradient; None with one device, or if the config disables it. See `SelfTest`."""
        topology, way = recipe.topology, recipe.layout.way
        mode = recipe.config.parallel.self_test
        if topology.num_devices == 1 or mode == "never":
            return None

        def first_batch(first: Any, columns: Any, key: Any = None) -> Batch:
            return gather_batch(first, columns, 0) if resident else first

        kind = f"{mode} self-test of {'resident steps' if resident else 'a step'}, {way}"
        # The self-test compares gradients, and metrics have none.
        plain, pieces = dataclasses.replace(objective, metrics={}), (*_pieces(objective), recipe.objective, topology)
        return self._cached(kind, pieces, lambda: SelfTest(recipe.minimized(plain), way, first_batch, mode))

    def way(self, way: Way) -> Way:
        """Return an equal way, whose programs may be compiled already."""
        return self._cached(str(way), (way.topology,), lambda: way)

    def follow(self, parts: tuple[Part, ...], way: Way) -> Follow:
        """Return the function that passes validations to the parts of the step; see `Way.follow`."""
        return self._cached(f"follow, {way}", (parts, way.topology), lambda: way.follow(parts))

    def evaluate(self, objective: Objective, topology: Topology, *, resident: bool) -> Callable[..., MetricSums]:
        """Return the program of evaluation, on batches or on images that are `resident` on the devices."""
        make = functools.partial(make_eval_step, objective, topology, resident=resident)
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
    """Return a training step (state, batch) with a constant seed; see `Way.step`."""
    way = recipe.layout.way
    way.check_own_loop()
    return way.step(step_phases(objective, recipe), compiler_options=recipe.resources.compiler_options, seed=seed)


def step_phases(objective: Objective, recipe: Recipe) -> Phases:
    """Return the phases of a training step that minimizes what the recipe makes of an objective."""
    return Phases(recipe.minimized(objective), recipe.optimizer, recipe.schedule, recipe.parts)


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
