"""Prepare a training: open the recipe of a file, and initialize the network of a recipe."""

import dataclasses

import jax
import numpy as np
import optax

from jaxddp.config import Config
from jaxddp.core.phases import doing, phase
from jaxddp.engine.initial_state import make_init
from jaxddp.engine.parts.averages import with_average
from jaxddp.measure.memory import memory_errors
from jaxddp.models.adapt import for_platform
from jaxddp.models.variables import by_path, trees_of
from jaxddp.recipe_file import RecipeFile
from jaxddp.setup.compiled_programs import CompiledPrograms, settings
from jaxddp.setup.fine_tuning import fine_tuned
from jaxddp.setup.initial_weights import WeightsTarget, initial_weights
from jaxddp.setup.keys_of_hooks import check_keys_of_hooks
from jaxddp.setup.network_checks import brings_weights, check_frozen_state
from jaxddp.setup.recipe import Recipe, make_recipe
from jaxddp.setup.resources import join_and_resolve, open_resources
from jaxddp.setup.run_setup import RunSetup, warn_of_equal_starts
from jaxddp.setup.user_objects import objects_of_hooks
from jaxddp.weights.match import Shapes
from jaxddp.weights.places import local_weights


@phase("start")
def open_recipe(file: RecipeFile, rate: optax.Schedule | None = None) -> Recipe:
    """Join the job, open the data and make the objects of a recipe file. Nothing is written yet.

    Args:
        rate: a learning rate schedule that replaces the config's.

    Raises: InputError if the recipe is invalid.
    """
    topology, config = join_and_resolve(file)
    resources = open_resources(config, topology)
    with doing("making network, loss and optimizer"):
        # The config.json of a run holds the precision that its platform chose.
        chosen = config.train.precision if "train.precision" in file.set_keys else None
        objects = objects_of_hooks(file.hooks)
        recipe = make_recipe(config, topology, resources, objects, rate, precision=chosen, file=file)
        recipe.early_stopping()
        if rate is None:
            check_keys_of_hooks(file, recipe, recipe.layout)
    return recipe


def initialize(recipe: Recipe, *, fresh: bool = True, programs: CompiledPrograms | None = None) -> RunSetup:
    """Initialize the network of a recipe.

    Args:
        fresh: whether the run starts from this state. If a checkpoint replaces it later, no weights or images are read.
        programs: a cache of compiled programs.

    Raises: InputError if the weights are of another network, or the processes have different data.
    """
    layout, topology, shape = recipe.layout, recipe.topology, recipe.layout.training_data.image_shape
    seed, file = recipe.feed.order.seed, recipe.file
    _check_agreement(recipe)
    layout.way.connect()
    recipe, shapes = complete_recipe(recipe)
    weights = _weights(recipe, shapes) if fresh else {}
    if not fresh:
        recipe = dataclasses.replace(recipe, initialize=None)
    network, programs = for_platform(recipe.model, topology.platform), programs or CompiledPrograms()
    init = programs.init(network, recipe, weights)
    out_of_memory = memory_errors(lambda: "while the network was initialized", lambda: "choose a smaller network")
    with doing("initializing the network"), out_of_memory:
        state = jax.block_until_ready(init(topology.replicate(jax.random.key(seed))))
        hooks = file.hooks if fresh and not weights and file is not None else {}
        is_made = seed != Config().seed and hooks.keys() & {"get_model", "get_initialize"}
        # `make_recipe` has compared the NNX modules that a hook returns for two seeds.
        if is_made and not brings_weights(recipe.model):
            # No optimizer state: memory may not suffice for two.
            other = make_init(network, optax.identity(), shape, topology, transform=recipe.initialize)
            warn_of_equal_starts(
                state.params, other(topology.replicate(jax.random.key(Config().seed))).params, topology
            )
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    asked = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    return RunSetup(**asked, network=network, state=state, like=like, weights=weights, programs=programs)


def _check_agreement(recipe: Recipe) -> None:
    """Check that all processes have the same data in the same order, and compile the same program."""
    resources, order, peers = recipe.resources, recipe.feed.order, recipe.topology.peers
    sources = {"training data": resources.train, "unlabelled data": resources.unlabelled}
    fingerprints = {name: source.fingerprint for name, source in sources.items() if source is not None}
    peers.agree(fingerprints | {"batch size": str(order.batch_size), "seed": str(order.seed)})
    # Processes with different programs would wait for each other forever.
    gradients = {"gradients come from": str(recipe.layout.way)}
    peers.agree(settings() | gradients | {"XLA's options": str(sorted(resources.compiler_options.items()))})


def _weights(recipe: Recipe, shapes: Shapes) -> dict[str, np.ndarray]:
    """Read the initial weights that the config names, by path. Raises: InputError."""
    config, source = recipe.config.model, recipe.resources.train
    if config.weights is None:
        return {}
    with doing(f"reading weights from {config.weights}"):
        path, shape = local_weights(config.weights, offline=config.offline), recipe.layout.training_data.image_shape
        target = WeightsTarget(recipe.model, shapes, source.num_classes, source.class_ids, shape, config.fresh_layers)
        return initial_weights(path, target, recipe.topology)


def complete_recipe(recipe: Recipe) -> tuple[Recipe, Shapes]:
    """Complete a recipe with what depends on the network.

    Returns:
        The recipe with the settings of single layers and with averaging, and the shapes of the network's arrays.

    Raises: see `fine_tuned`.
    """
    shape = recipe.layout.training_data.image_shape
    params, model_state = trees_of(recipe.model, shape)
    shapes = {path: leaf.shape for path, leaf in by_path(params, model_state).items()}
    recipe = fine_tuned(recipe, shapes)
    check_frozen_state(recipe.model, recipe.config.frozen_norms, (params, model_state), shape)
    opt_state = jax.eval_shape(recipe.optimizer.init, params)
    recipe.layout.way.check(recipe.parts, opt_state)
    return dataclasses.replace(recipe, parts=with_average(recipe.parts, opt_state)), shapes
