"""A recipe is laid out over its resources: what contradicts is said first, and the network is initialized last."""

import dataclasses
from pathlib import Path

import jax

from jaxddp.augment.mixing import check_mixing
from jaxddp.augment.preprocess import Preprocess, check_augmentation
from jaxddp.data.order import SampleOrder
from jaxddp.data.source import check_labelled, image_dtype
from jaxddp.engine.gradients import Gradients
from jaxddp.errors import InputError
from jaxddp.experiment.feed import Feed
from jaxddp.experiment.fine_tuning import fine_tuned
from jaxddp.experiment.image_sizes import check_sizes, growth_of, shapes_in_training
from jaxddp.experiment.initial_weights import initial_weights, parameter_names, shapes_of
from jaxddp.experiment.programs import Programs, settings
from jaxddp.experiment.recipe import Recipe
from jaxddp.experiment.resources import Resources
from jaxddp.experiment.setup import RunSetup
from jaxddp.job.membership import agree
from jaxddp.measure.memory import named
from jaxddp.models.adapt import for_platform
from jaxddp.training.plan import Plan


def prepare(recipe: Recipe, resources: Resources) -> RunSetup:
    """Lay a recipe out over its resources and initialize its state. Raises: InputError; as the functions below."""
    return initialize(recipe, resources, make_feed(recipe, resources), make_preprocess(recipe, resources))


def initialize(
    recipe: Recipe, resources: Resources, feed: Feed, preprocess: Preprocess, *, fresh: bool = True
) -> RunSetup:
    """The last part of `prepare`: what compiles.

    Where the state is not to be `fresh` but restored, no weights and no images are read for it. Raises: InputError; the
    weights are of another network, or the processes hold different data.
    """
    order, source, topology = feed.order, feed.source, resources.topology
    agree({"training data": source.fingerprint, "batch size": str(order.batch_size), "seed": str(order.seed)})
    # A program of other types would wait for that of another process.
    travel = {"gradients come from": str(Gradients.of(recipe.config, topology))}
    agree(settings() | travel | {"XLA's options": str(sorted(resources.compiler_options.items()))})
    topology.connect()
    plan, shape = Plan.of(recipe.config, len(source)), source.image_shape(feed.data)
    shapes = shapes_of(recipe.model, shape)
    recipe = fine_tuned(recipe, parameter_names(shapes), plan)
    if not fresh:
        recipe = dataclasses.replace(recipe, initialize=None)
    elif (start := recipe.config.model.weights) is not None:
        place, new = Path(start).expanduser(), recipe.config.model.new
        weights = initial_weights(place, recipe.model, shapes, source.num_classes, topology, new)
        recipe = dataclasses.replace(recipe, weights=weights)
    model, programs = for_platform(recipe.model, topology.platform), Programs()
    init = programs.init(model, recipe, shape, topology)
    with named(lambda: "as the network was initialized", lambda: "choose a smaller network"):
        state = jax.block_until_ready(init(topology.replicate(jax.random.key(order.seed))))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return RunSetup(recipe, resources, model, feed, preprocess, state, like, programs)


def make_feed(recipe: Recipe, resources: Resources) -> Feed:
    """The training data over the devices.

    Raises: InputError; they cannot share a batch and its groups, or keep it, or the network does not take its sizes.
    """
    config, source = recipe.config, resources.train
    check_labelled(source, "training data")
    gradients, topology = Gradients.of(config, resources.topology), resources.topology
    gradients.check_batch_size(config.train.batch_size, topology)
    config.model.batch_statistics.check(config.train.batch_size, gradients.parts(topology))
    if config.data.cache == "device":
        source.check_resident(config.data)
    order = SampleOrder(len(source), config.train.batch_size, config.seed)
    substitutes, growth = source.substitutes(config.data), growth_of(config, source)
    check_sizes(config, source, recipe.model)
    return Feed(source, order, config.data, resources.topology, substitutes, growth)


def make_preprocess(recipe: Recipe, resources: Resources) -> Preprocess:
    """What is done to the images on the devices. Raises: InputError; augmentation, mean or std do not fit them."""
    config, data = recipe.config, recipe.config.data
    shape = resources.train.image_shape(data)
    if not (len(data.mean) == len(data.std) == 1 or len(data.mean) == len(data.std) >= shape[-1]):
        raise InputError(
            f"data.mean has {len(data.mean)} values, data.std {len(data.std)}, and images of {shape} have {shape[-1]} "
            "channels; give a value for each channel, or one for all"
        )
    gradients, dtype = Gradients.of(config, resources.topology), config.train.precision or "float32"
    preprocess = Preprocess(data.mean, data.std, data.augment, dtype, recipe.augmentation)
    for size in shapes_in_training(config, resources.train):
        check_augmentation(preprocess, size, image_dtype(resources.train, data))
    check_mixing(data.augment, config.train.batch_size, gradients.parts(resources.topology))
    return preprocess
