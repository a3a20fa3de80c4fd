"""A recipe is laid out over its resources: what contradicts is said first, and the network is initialized last."""

import dataclasses
import inspect
from pathlib import Path

import jax

import jaxddp.job.progress as progress
from jaxddp.augment.mixing import check_mixing
from jaxddp.augment.preprocess import Preprocess, check_augmentation
from jaxddp.config import Config, DataConfig
from jaxddp.data.balanced_order import BalancedOrder
from jaxddp.data.growth import Growth
from jaxddp.data.labels import is_multi_label
from jaxddp.data.order import SampleOrder, unlabelled_seed
from jaxddp.data.source import Source, check_labelled, image_dtype
from jaxddp.engine.gradients import Gradients
from jaxddp.engine.objective import Objective, supervised
from jaxddp.engine.parts.schedule_free_average import with_average
from jaxddp.errors import InputError, about
from jaxddp.experiment.feed import Feed
from jaxddp.experiment.fine_tuning import fine_tuned
from jaxddp.experiment.image_sizes import check_sizes, growth_of, shapes_in_training
from jaxddp.experiment.initial_weights import by_path, initial_weights, trees_of
from jaxddp.experiment.programs import Programs, settings
from jaxddp.experiment.recipe import Recipe
from jaxddp.experiment.resources import Resources, check_pixels
from jaxddp.experiment.setup import RunSetup
from jaxddp.job.membership import agree
from jaxddp.measure.memory import named
from jaxddp.mesh import Topology
from jaxddp.models.adapt import for_platform
from jaxddp.training.plan import Plan
from jaxddp.weights.match import Shapes
from jaxddp.wording import counted


def prepare(recipe: Recipe, resources: Resources, programs: Programs | None = None) -> RunSetup:
    """Lay a recipe out over its resources and initialize its state. Raises: InputError; as the functions below."""
    feed, preprocess = make_feed(recipe, resources), make_preprocess(recipe, resources)
    return initialize(recipe, resources, feed, preprocess, programs=programs)


def initialize(
    recipe: Recipe,
    resources: Resources,
    feed: Feed,
    preprocess: Preprocess,
    *,
    fresh: bool = True,
    programs: Programs | None = None,
) -> RunSetup:
    """The last part of `prepare`: what compiles, unless `programs` has it of another setup of the same objects.

    Where the state is not to be `fresh` but restored, no weights and no images are read for it. Raises: InputError; the
    weights are of another network, or the processes hold different data.
    """
    order, source, topology = feed.order, feed.source, resources.topology
    sources = {"training data": source, "unlabelled data": resources.unlabelled}
    held = {name: each.fingerprint for name, each in sources.items() if each is not None}
    agree(held | {"batch size": str(order.batch_size), "seed": str(order.seed)})
    # A program of other types would wait for that of another process.
    travel = {"gradients come from": str(Gradients.of(recipe.config, topology))}
    agree(settings() | travel | {"XLA's options": str(sorted(resources.compiler_options.items()))})
    topology.connect()
    shape = source.image_shape(feed.data)
    recipe, shapes = completed(recipe, shape, len(source))
    if not fresh:
        recipe = dataclasses.replace(recipe, initialize=None)
    elif (start := recipe.config.model.weights) is not None:
        place, new = Path(start).expanduser(), recipe.config.model.new
        with progress.doing(f"reading weights from {start}"):
            ids = tuple(source.class_ids)
            weights = initial_weights(place, recipe.model, shapes, source.num_classes, topology, new, ids)
        recipe = dataclasses.replace(recipe, weights=weights)
    model, programs = for_platform(recipe.model, topology.platform), programs or Programs()
    init = programs.init(model, recipe, shape, topology)
    out_of_memory = named(lambda: "as the network was initialized", lambda: "choose a smaller network")
    with progress.doing("initializing the network"), out_of_memory:
        state = jax.block_until_ready(init(topology.replicate(jax.random.key(order.seed))))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return RunSetup(recipe, resources, model, feed, preprocess, state, like, programs)


def completed(recipe: Recipe, image_shape: tuple[int, int, int], num_examples: int) -> tuple[Recipe, Shapes]:
    """The recipe with what follows from its network, and the shapes of that. Raises: as `fine_tuned`."""
    trees = trees_of(recipe.model, image_shape)
    shapes = {path: leaf.shape for path, leaf in by_path(*trees).items()}
    recipe = fine_tuned(recipe, shapes, Plan.of(recipe.config, num_examples))
    opt_state = jax.eval_shape(recipe.optimizer.init, trees[0])
    return dataclasses.replace(recipe, parts=with_average(recipe.parts, opt_state)), shapes


def make_feed(recipe: Recipe, resources: Resources) -> Feed:
    """The training data over the devices, with the second source where the objective may ask for it.

    Raises: InputError; the devices cannot share a batch and its groups, or keep it, a set is smaller than its batch, or
        the network does not take all sizes.
    """
    config, source = recipe.config, resources.train
    check_labelled(source, "training data")
    gradients, topology = Gradients.of(config, resources.topology), resources.topology
    gradients.check_batch_size(config.train.batch_size, topology)
    config.model.batch_statistics.check(config.train.batch_size, gradients.parts(topology))
    check_sizes(config, source, recipe.model)
    growth = growth_of(config, source)
    feed = _feed_of(source, make_order(source, config), config, topology, growth)
    others, ratio = resources.unlabelled, config.objective.unlabelled_ratio
    reads = recipe.objective is not supervised and getattr(recipe.objective, "reads_unlabelled", True)
    if others is None or not reads:
        return feed
    check_pixels(others, source, config.data, "unlabelled data")
    with about(f"data.unlabelled with objective.unlabelled_ratio={ratio}"):
        order = SampleOrder(len(others), config.train.batch_size * ratio, unlabelled_seed(config.seed))
        return dataclasses.replace(feed, unlabelled=_feed_of(others, order, config, topology, growth))


def _feed_of(source: Source, order: SampleOrder, config: Config, topology: Topology, growth: Growth | None) -> Feed:
    if config.data.cache == "device":
        source.check_resident(config.data)
    return Feed(source, order, config.data, topology, source.substitutes(config.data), growth)


def make_order(source: Source, config: Config) -> SampleOrder:
    """Which examples each batch holds. Raises: InputError; the batch is larger than the data set."""
    if config.data.sampling == "balanced":
        if is_multi_label(source):
            raise InputError("data.sampling=balanced takes one label an image, and the training data have several")
        return BalancedOrder.of(source.labels, config.train.batch_size, config.seed)
    return SampleOrder(len(source), config.train.batch_size, config.seed)


def check_normalization(data: DataConfig, image_shape: tuple[int, int, int]) -> None:
    """Raises `InputError` where mean and std do not fit images [H, W, C]."""
    if not (len(data.mean) == len(data.std) == 1 or len(data.mean) == len(data.std) >= image_shape[-1]):
        raise InputError(
            f"data.mean has {counted(len(data.mean), 'value')}, data.std {len(data.std)}, and images of {image_shape} "
            f"have {image_shape[-1]} channels; give a value for each channel, or one for all"
        )


def make_preprocess(recipe: Recipe, resources: Resources) -> Preprocess:
    """What is done to the images on the devices. Raises: InputError; augmentation, mean or std do not fit them."""
    config, data = recipe.config, recipe.config.data
    shape = resources.train.image_shape(data)
    check_normalization(data, shape)
    gradients, dtype = Gradients.of(config, resources.topology), config.train.precision or "float32"
    preprocess = Preprocess(data.mean, data.std, data.augment, dtype, recipe.augmentation)
    for size in shapes_in_training(config, resources.train):
        check_augmentation(preprocess, size, image_dtype(resources.train, data))
    check_mixing(data.augment, config.train.batch_size, gradients.parts(resources.topology))
    if (check := getattr(inspect.unwrap(recipe.objective), "check", None)) is not None:
        image = jax.ShapeDtypeStruct(shape, image_dtype(resources.train, data))
        objective = Objective(recipe.model, recipe.loss, preprocess, recipe.metrics)
        check(objective, image, unlabelled=resources.unlabelled is not None)
    return preprocess
