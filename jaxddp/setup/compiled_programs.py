"""The compiled programs of a recipe. The state, the random key and the batches are their arguments."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxddp.config.registry import METRICS
from jaxddp.data.batch import Batch
from jaxddp.data.labels import LabelKind
from jaxddp.engine.example_loss import ExampleLoss, Loss, example_loss
from jaxddp.engine.initial_state import make_init
from jaxddp.engine.objective import MetricSums, Objective
from jaxddp.engine.parts.part import Follow, Part
from jaxddp.engine.predictions import make_classify
from jaxddp.engine.programs import Program, gather_batch, make_eval_step
from jaxddp.engine.self_test import SelfTest
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Way
from jaxddp.mesh import Topology
from jaxddp.models.interface import Model
from jaxddp.setup.recipe import Recipe

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
        # The pieces are kept beside their program, so no other object gets their ids.
        self._programs: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def loss(self, function: Loss, labels: LabelKind) -> ExampleLoss:
        """Return the loss of each example; see `example_loss`."""
        return self._cached("loss", (function,), lambda: example_loss(function, labels))

    def init(
        self, network: Model, recipe: Recipe, weights: Mapping[str, np.ndarray]
    ) -> Callable[[jax.Array], TrainState]:
        """Return the function (key) -> initial state; see `make_init`.

        Args:
            network: the model of the recipe, adapted to the platform.
            weights: arrays by path, which replace freshly initialized arrays.
        """
        topology, way, image_shape = recipe.topology, recipe.layout.way, recipe.layout.training_data.image_shape
        options = {"parts": recipe.parts, "transform": recipe.initialize}
        pieces = (network, recipe.optimizer, *options.values(), topology, type(way).jit_init)
        make = functools.partial(make_init, network, recipe.optimizer, image_shape, topology, way=way, **options)
        init = self._cached(f"init {image_shape}", pieces, make)
        return lambda key: init(key, topology.replicate(dict(weights)))

    def train(self, objective: Objective, recipe: Recipe, *, resident: bool) -> Program:
        """Return the program of the training steps, on batches or on images that are `resident` on the devices."""
        topology, way, options = recipe.topology, self.way(recipe.layout.way), recipe.resources.compiler_options
        phases = step_phases(objective, recipe)
        make = functools.partial(way.program, phases, resident=resident, compiler_options=options)
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
        make = lambda: {name: METRICS.get(name) for name in names} | dict(recipe_metrics)  # noqa: E731
        return self._cached(f"metrics {names}", (recipe_metrics,), make)

    def classify(self, objective: Objective, topology: Topology) -> Callable[[TrainState, Batch], Any]:
        """Return the program of prediction; see `make_classify`."""
        kind = f"classify by {objective.views}"
        return self._cached(kind, (*_pieces(objective), topology), lambda: make_classify(objective, topology))

    def _cached(self, kind: str, pieces: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        # Compare identities: two objects of a user may be equal and still compute different values.
        key = kind, tuple(settings().items()), tuple(map(id, pieces))
        self._programs[key] = entry = self._programs.pop(key, None) or (make(), pieces)
        if len(self._programs) > self._max_programs:
            del self._programs[next(iter(self._programs))]
        return entry[0]


def step_phases(objective: Objective, recipe: Recipe) -> Phases:
    """Return the phases of a training step that minimizes what the recipe makes of an objective."""
    return Phases(recipe.minimized(objective), recipe.optimizer, recipe.schedule, recipe.parts)


def _pieces(objective: Objective) -> tuple[Any, ...]:
    return objective.model, objective.loss, objective.preprocess, objective.metrics
