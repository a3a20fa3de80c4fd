"""Prepare a training: open its experiment, lay out its recipe, and initialize its network."""

import dataclasses

import jax
import numpy as np
import optax

from jaxddp.config import Config
from jaxddp.core.phases import doing, phase
from jaxddp.engine.groups.outer_step import check_groups
from jaxddp.engine.initial_state import make_init
from jaxddp.engine.parts.averages import with_average
from jaxddp.measure.memory import memory_errors
from jaxddp.mesh import Topology
from jaxddp.models.adapt import for_platform
from jaxddp.models.interface import Model
from jaxddp.models.variables import by_path, trees_of
from jaxddp.recipe_file import RecipeFile
from jaxddp.setup.compiled_programs import CompiledPrograms, settings
from jaxddp.setup.experiment import Experiment, early_stopping_of, lay_out
from jaxddp.setup.fine_tuning import fine_tuned
from jaxddp.setup.initial_weights import WeightsTarget, initial_weights
from jaxddp.setup.keys_of_hooks import check_keys_of_hooks
from jaxddp.setup.layout import Layout, TrainingData
from jaxddp.setup.network_checks import brings_weights, check_frozen_state
from jaxddp.setup.recipe import Recipe, make_recipe
from jaxddp.setup.resources import Resources, join_and_resolve, open_resources
from jaxddp.setup.run_setup import RunSetup, warn_of_equal_starts
from jaxddp.setup.user_objects import objects_of_hooks
from jaxddp.weights.match import Shapes
from jaxddp.weights.places import local_weights


@phase("start")
def open_experiment(file: RecipeFile, rate: optax.Schedule | None = None) -> Experiment:
    """Join the job, open the data and make the objects of a recipe file. Nothing is written yet.

    Args:
        rate: a learning rate schedule that replaces the config's.

    Raises: InputError if the recipe is invalid.
    """
    topology, config = join_and_resolve(file)
    resources = open_resources(config, topology)
    with doing("making network, loss and optimizer"):
        layout = Layout.of(config, topology, TrainingData.of(resources.train, config.data))
        # The config.json of a run holds the precision that its platform chose.
        chosen = config.train.precision if "train.precision" in file.set_keys else None
        objects = objects_of_hooks(file.hooks)
        recipe = make_recipe(config, layout, topology, objects, rate, precision=chosen)
        experiment = lay_out(recipe, resources, layout, file)
        early_stopping_of(experiment)
        if rate is None:
            check_keys_of_hooks(file, recipe, layout)
    return experiment


def prepare(recipe: Recipe, resources: Resources, layout: Layout, programs: CompiledPrograms | None = None) -> RunSetup:
    """Make the experiment of a recipe and initialize its state. Raises: see `lay_out` and `initialize`."""
    return initialize(lay_out(recipe, resources, layout), programs=programs)


def initialize(experiment: Experiment, *, fresh: bool = True, programs: CompiledPrograms | None = None) -> RunSetup:
    """Initialize the network of an experiment.

    Args:
        fresh: whether the run starts from this state. If a checkpoint replaces it later, no weights or images are read.
        programs: a cache of compiled programs.

    Raises: InputError if the weights are of another network, or the processes have different data.
    """
    layout, topology, shape = experiment.layout, experiment.topology, experiment.layout.training_data.image_shape
    order = experiment.feed.order
    _check_agreement(experiment)
    topology.connect()
    if layout.groups is not None:
        layout.groups.connect()
    recipe, shapes = complete_recipe(experiment.recipe, layout, topology)
    weights = _weights(experiment, recipe.model, shapes) if fresh else {}
    if not fresh:
        recipe = dataclasses.replace(recipe, initialize=None)
    model, programs = for_platform(recipe.model, topology.platform), programs or CompiledPrograms()
    init = programs.init(model, recipe, shape, topology, weights, layout.gradients)
    key = topology.replicate(jax.random.key(order.seed))
    out_of_memory = memory_errors(lambda: "while the network was initialized", lambda: "choose a smaller network")
    with doing("initializing the network"), out_of_memory:
        state = jax.block_until_ready(init(key))
        hooks = experiment.file.hooks if fresh and not weights and experiment.file is not None else {}
        is_made = order.seed != Config().seed and hooks.keys() & {"get_model", "get_initialize"}
        # `make_recipe` has compared the NNX modules that a hook returns for two seeds.
        if is_made and not brings_weights(recipe.model):
            # No optimizer state: memory may not suffice for two.
            other = make_init(model, optax.identity(), shape, topology, transform=recipe.initialize)
            key = topology.replicate(jax.random.key(Config().seed))
            warn_of_equal_starts(state.params, other(key).params, topology)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    experiment = dataclasses.replace(experiment, recipe=recipe)
    return RunSetup(experiment, model, state, like, weights, programs)


def _check_agreement(experiment: Experiment) -> None:
    """Check that all processes have the same data in the same order, and compile the same program."""
    resources, layout, order = experiment.resources, experiment.layout, experiment.feed.order
    sources = {"training data": resources.train, "unlabelled data": resources.unlabelled}
    fingerprints = {name: source.fingerprint for name, source in sources.items() if source is not None}
    peers = experiment.topology.peers
    peers.agree(fingerprints | {"batch size": str(order.batch_size), "seed": str(order.seed)})
    # Processes with different programs would wait for each other forever.
    gradients = {"gradients come from": str(layout.gradients)}
    peers.agree(settings() | gradients | {"XLA's options": str(sorted(resources.compiler_options.items()))})


def _weights(experiment: Experiment, model: Model, shapes: Shapes) -> dict[str, np.ndarray]:
    """Read the initial weights that the config names, by path. Raises: InputError."""
    model_config, source = experiment.config.model, experiment.resources.train
    start, new_layers = model_config.weights, model_config.fresh_layers
    if start is None:
        return {}
    with doing(f"reading weights from {start}"):
        path = local_weights(start, offline=model_config.offline)
        image_shape = experiment.layout.training_data.image_shape
        target = WeightsTarget(model, shapes, source.num_classes, source.class_ids, image_shape, new_layers)
        return initial_weights(path, target, experiment.topology)


def complete_recipe(recipe: Recipe, layout: Layout, topology: Topology) -> tuple[Recipe, Shapes]:
    """Complete a recipe with what depends on the network.

    Returns:
        The recipe with the settings of single layers and with averaging, and the shapes of the network's arrays.

    Raises: see `fine_tuned`.
    """
    shape = layout.training_data.image_shape
    params, model_state = trees_of(recipe.model, shape)
    shapes = {path: leaf.shape for path, leaf in by_path(params, model_state).items()}
    recipe = fine_tuned(recipe, shapes, layout.plan, topology.peers)
    check_frozen_state(recipe.model, recipe.config.frozen_norms, (params, model_state), shape)
    opt_state = jax.eval_shape(recipe.optimizer.init, params)
    if layout.groups is not None:
        check_groups(layout.groups, recipe.parts, opt_state)
    return dataclasses.replace(recipe, parts=with_average(recipe.parts, opt_state)), shapes
